#!/usr/bin/env python3
"""What each container and each structure costs on a model: bytes, time, exactness, BLEU. Writes docs/caches.md.

Usage: scripts/cache_page.py [--checkpoint DIR] [--lines 200] [--results results/caches.json] [--page docs/caches.md]
       scripts/cache_page.py --from results/caches.json           # writes the page anew, measures nothing

Containers hold the checkpoint's own weights. Bytes are those of one row's self-attention at a length, all layers. A
token's time is the decoder alone, one row, a source of 40 tokens, plain PyTorch on one thread: rounds over all arms,
medians. The logits' largest difference is against one pass without a cache, over the longest references of the test
part, in fp32; BLEU is of its longest lines, greedy. Structures have the sizes of the same model and random weights:
nothing is said of how well they translate.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from train.data import load_data
from train.recipe import read_recipe
from translator.attention import STRUCTURES
from translator.cache import DecoderCache, cache_options, container_of
from translator.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, read_checkpoint
from translator.config import ModelConfig
from translator.decoder import CachedDecoder
from translator.metrics import corpus_scores
from translator.model import TranslationModel
from translator.pipeline import Translator
from translator.textio import atomic_write_bytes, json_text

LENGTHS = (16, 128, 512)
SOURCE, ROUNDS, STEPS, SENTENCES = 40, 5, 6, 40
CONTAINERS = (
    "dynamic", "static", "indirect", "paged", "offloaded", "quantised,bits=8,group=8,residual=0",
    "quantised,bits=4,group=8,residual=0", "quantised,bits=2,group=8,residual=0", "sliding,window=32",
    "sliding,window=8", "sliding_static,window=8",
)  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "grouped": [{"kv_heads": 2}, {"kv_heads": 1}],
    "compressed": [{"rate": 4}, {"rate": 16, "top_k": 0}],
}


def own_bytes(cache: DecoderCache) -> int:
    """Of the decoder's own tokens; the source's keys and values are the same everywhere."""
    return sum(state.nbytes for state in cache.states)


class Arm:
    """One decoder and one kind of cache, at every length."""

    def __init__(self, decoder: CachedDecoder, cache: dict[str, Any]) -> None:
        self.decoder = decoder
        self.width = decoder.stack[0].multihead_attn.embed_dim
        self.options = dict(cache)
        if container_of(cache["kind"]).needs_capacity:
            self.options["capacity"] = max(LENGTHS) + STEPS + 1
        self.bytes: dict[int, int] = {}
        self.seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}

    def measure(self, length: int) -> None:
        cache = self.decoder.start(torch.zeros(1, SOURCE, self.width), **self.options)
        self.decoder(torch.randn(1, length, self.width), cache)
        self.bytes[length] = own_bytes(cache)
        tokens = torch.randn(STEPS, 1, 1, self.width)
        for number, token in enumerate(tokens):
            began = time.perf_counter()
            self.decoder(token, cache)
            if number:  # the first makes room
                self.seconds[length].append(time.perf_counter() - began)

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": {str(length): self.bytes[length] for length in LENGTHS},
            "ms": {str(length): 1e3 * statistics.median(self.seconds[length]) for length in LENGTHS},
        }


def race(arms: dict[str, Arm]) -> None:
    """All arms in turn, round by round, so that a noisy machine harms all alike."""
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for length in LENGTHS:
                for arm in arms.values():
                    arm.measure(length)


def difference(checkpoint: Checkpoint, cache: dict[str, Any], pairs: list[tuple[str, str]]) -> float:
    """The largest difference of any logit between steps with the cache and one pass without."""
    model, tokenizer, most = checkpoint.model.eval(), checkpoint.tokenizer, 0.0
    with torch.inference_mode():
        for source, reference in pairs:
            memory = model.encode(torch.tensor([[*tokenizer.encode(source), tokenizer.eos_id]]))
            target = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(reference)]])
            whole = model.logits(model.decode(target, memory))
            held = model.start(memory, **cache, capacity=target.shape[1])
            steps = torch.cat([model.logits(model.decode(token, held)) for token in target.split(1, dim=1)], dim=1)
            most = max(most, float((steps - whole).abs().max()))
    return most


def containers(path: Path, lines: int) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    recipe, base = read_recipe(
        "small", [f'source_language="{config.source_language}"', f'target_language="{config.target_language}"']
    )
    test = load_data(recipe, base, lambda line: None).test
    longest = sorted(range(len(test.sources)), key=lambda i: -len(test.references[i][0]))[:lines]
    sources, references = ([part[i] for i in longest] for part in (test.sources, test.references))
    pairs = [(source, some[0]) for source, some in zip(sources[:SENTENCES], references, strict=False)]
    arms = {name: Arm(checkpoint.model.decoder.eval(), cache_options(name)) for name in CONTAINERS}
    race(arms)
    found = {}
    for name, arm in arms.items():
        translator = Translator(checkpoint, engine="eager", cache=name)
        translations = translator.translate(sources, beam_size=1)
        scores = corpus_scores(translations, references, config.target_language)
        found[name] = arm.figures() | {
            "difference": difference(checkpoint, cache_options(name), pairs),
            "bleu": scores["bleu"].value,
        }
        typer.echo(f"{name}: {json.dumps(found[name])}")
    return found


def structures(like: ModelConfig) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for name in sorted(STRUCTURES):
        entries += [{"attention": name, **options} for options in OPTIONS.get(name, [{}])]
    arms, found = {}, {}
    for entry in entries:
        label = entry["attention"] + "".join(f", {key} {value}" for key, value in entry.items() if key != "attention")
        # What reads another layer's keys needs one below it that has some.
        first: Any = "multihead" if entry["attention"] == "shared" else entry
        layers = [first, *[entry] * (like.num_decoder_layers - 1)]
        sizes = {**vars(like), "decoder_layers": layers, "num_encoder_layers": 0}
        torch.manual_seed(0)
        model = TranslationModel(ModelConfig(**sizes)).eval()
        arms[label] = Arm(model.decoder, {"kind": "dynamic"})
        found[label] = {"parameters": sum(p.numel() for p in model.decoder.parameters()), "difference": gap(model)}
    race(arms)
    for label, arm in arms.items():
        found[label] |= arm.figures()
        typer.echo(f"{label}: {json.dumps(found[label])}")
    return found


@torch.inference_mode()
def gap(model: TranslationModel, length: int = 96) -> float:
    """The largest difference of a hidden state between steps of one token and one pass, random tokens."""
    width = model.config.d_model
    memory, x = torch.randn(1, SOURCE, width), torch.randn(1, length, width)
    whole = model.decoder(x, memory, tgt_is_causal=True)
    cache = model.decoder.start(memory)
    steps = torch.cat([model.decoder(token, cache) for token in x.split(1, dim=1)], dim=1)
    return float((steps - whole).abs().max())


# -- the page --------------------------------------------------------------------------------------------------------

HEAD = """# What each cache costs

Written by `scripts/cache_page.py` from [`results/caches.json`](../results/caches.json): {cpu}, one thread, fp32,
torch {torch}, the decoder of `{model}` (width {width}, {layers} layers), one row, a source of {source} tokens. Bytes
are those of the decoder's own tokens in all layers, allocated, at 16, 128 and 512 tokens; milliseconds are one step of
the decoder in plain PyTorch, medians of {rounds} rounds in which all take turns. Another machine gives other times:
read their ratios.
"""
CONTAINERS_HEAD = """
## Containers

Chosen with `--cache NAME`, on the model's own weights. The difference is the largest of any logit over the
{sentences} longest sentences of the test part, against one pass without a cache; BLEU is that of its {lines} longest
lines, greedy. Those that round or forget change what is computed, and say so on stderr.

| container | bytes at 16 | at 128 | at 512 | ms a token at 16 | at 128 | at 512 | largest Δ logit | BLEU |
|---|---|---|---|---|---|---|---|---|
"""
STRUCTURES_HEAD = """
## Structures

Chosen with `decoder_layers` in a recipe, here in every layer (`shared` reads the keys of a `multihead` layer below it),
in the `dynamic` container, with random weights: what they cost, not how well they translate, which no run has measured
yet. The difference is the largest of any hidden state over 96 steps, against one pass.

| structure | parameters | bytes at 16 | at 128 | at 512 | ms a token at 16 | at 128 | at 512 | largest Δ |
|---|---|---|---|---|---|---|---|---|
"""


def page(results: dict[str, Any]) -> str:
    def row(*cells: str) -> str:
        return f"| {' | '.join(cells)} |\n"

    def sizes(found: dict[str, Any]) -> list[str]:
        return [f"{found['bytes'][str(n)]:,}" for n in LENGTHS] + [f"{found['ms'][str(n)]:.2f}" for n in LENGTHS]

    text = HEAD.format(**results["setting"]) + CONTAINERS_HEAD.format(**results["setting"])
    for name, found in results["containers"].items():
        text += row(f"`{name}`", *sizes(found), f"{found['difference']:.1e}", f"{found['bleu']:.1f}")
    text += STRUCTURES_HEAD
    for name, found in results["structures"].items():
        text += row(f"`{name}`", f"{found['parameters']:,}", *sizes(found), f"{found['difference']:.1e}")
    return text


def cpu_name() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else "a CPU without a name"


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the model.")] = DEFAULT_CHECKPOINT,
    lines: Annotated[int, typer.Option(help="Lines that are translated for BLEU.")] = 200,
    results: Path = Path("results/caches.json"),
    page_path: Annotated[Path, typer.Option("--page")] = Path("docs/caches.md"),
    given: Annotated[Path | None, typer.Option("--from", help="Figures measured before.")] = None,
) -> None:
    """Measure every container and structure, and write the page."""
    torch.set_num_threads(1)
    if given is not None:
        found = json.loads(given.read_text())
    else:
        model = read_checkpoint(checkpoint).config.model
        setting = {
            "cpu": cpu_name(), "torch": torch.__version__, "model": checkpoint.name, "width": model.d_model,
            "layers": model.num_decoder_layers, "source": SOURCE, "rounds": ROUNDS, "sentences": SENTENCES,
            "lines": lines,
        }  # fmt: skip
        measured = containers(checkpoint, lines)
        found = {"setting": setting, "containers": measured, "structures": structures(model)}
        atomic_write_bytes(results, (json_text(found, indent=1) + "\n").encode())
    atomic_write_bytes(page_path, page(found).encode())


if __name__ == "__main__":
    typer.run(main)
