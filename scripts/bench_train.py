"""Training against a plain script and against eole: target tokens a second and a CPU second, at equal sizes.

    scripts/bench_train.py [--eole PYTHON] [--processes] [--output results/bench_train.json]

The plain script is what one writes first: `nn.Transformer`, `nn.Dropout`, padded batches, bf16 autocast where the CPU
computes it, AdamW, `F.cross_entropy` with label smoothing, clipping. Both sides train the same model from the same
weights on the same batches in the same order, each in a process of its own; they take turns, block by block, and each
block is a pair: the ratios are of pairs, so that a noisy machine harms both alike. Losses are printed side by side.

eole (OpenNMT's successor) has a loop, batches and a process of its own; it is given the same text, vocabulary and
sizes, and two runs of different length, whose difference is the time of its steps without its start.

`--processes` compares whole runs of `translator train`: one process of two threads, and two of one thread under
torchrun.
"""

import contextlib
import json
import math
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train.backward import Backward
from train.batches import Encoded, collate, divided, plan_epoch
from train.data import encode_pairs, load_data, prepared
from train.loop import uses_bfloat16
from train.memory import keep_freed_memory
from train.optimizer import Optimizer
from train.recipe import TrainingConfig, read_recipe
from translator.checkpoint import DEFAULT_CHECKPOINT
from translator.config import ModelConfig, preset
from translator.model import TranslationModel
from translator.padding import pad, padding
from translator.textio import atomic_write_bytes, json_text
from translator.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SMOOTHING, DROPOUT, RATE, WARMUP, CLIP = 0.1, 0.2, 7e-4, 100, 1.0
CPU = torch.device("cpu")


class Plain(nn.Module):
    """The plain script's model, of PyTorch's own parts; its state is the project's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.source_positions = nn.Embedding(config.max_positions, config.d_model)
        self.target_positions = nn.Embedding(config.max_positions, config.d_model)
        whole = nn.Transformer(
            config.d_model,
            config.nhead,
            config.num_encoder_layers,
            config.num_decoder_layers,
            config.dim_feedforward,
            dropout=config.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder, self.decoder, self.dropout = whole.encoder, whole.decoder, nn.Dropout(config.dropout)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # the same regularisation: the project drops no attention weights

    def forward(self, source: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        scale = math.sqrt(self.embedding.embedding_dim)
        x = self.dropout(self.embedding(source) * scale + self.source_positions.weight[: source.shape[1]])
        memory = self.encoder(x, src_key_padding_mask=hidden)
        y = self.dropout(self.embedding(target) * scale + self.target_positions.weight[: target.shape[1]])
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=x.dtype)
        states = self.decoder(y, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=hidden)
        return F.linear(states, self.embedding.weight)


class PlainScript:
    """One step of the obvious loop."""

    def __init__(self, model: TranslationModel, bfloat16: bool) -> None:
        self.model, self.bfloat16 = Plain(model.config), bfloat16
        self.model.load_state_dict(model.state_dict())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, encoded: Encoded, indices: list[int], rate: float, ids: tuple[int, int, int]) -> float:
        bos, eos, filler = ids
        sources, targets = ([part[index] for index in indices] for part in (encoded.sources, encoded.targets))
        source, hidden = pad(sources, filler), padding([len(one) for one in sources])
        target = pad([[bos, *one] for one in targets], filler)
        wanted = pad([[*one, eos] for one in targets], -100)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            logits = self.model(source, hidden, target)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=SMOOTHING, ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()


class Project:
    """One step of `train.loop`, without its reports, averages and validations, which the plain script lacks."""

    def __init__(self, model: TranslationModel, bfloat16: bool) -> None:
        keep_freed_memory()
        self.model = model.train()
        self.backward = Backward(model, SMOOTHING, bfloat16)
        self.optimizer = Optimizer(model, TrainingConfig(learning_rate=RATE))

    def step(self, encoded: Encoded, indices: list[int], rate: float, ids: tuple[int, int, int]) -> float:
        tokens = sum(len(encoded.targets[index]) + 1 for index in indices)
        parts = divided(indices, self.backward.parts(tokens))
        batches = [collate(encoded, part, *ids[:2]) for part in parts]
        self.optimizer.set_rate(rate)
        with self.backward.on_one_thread():
            loss = self.backward.run(batches, tokens)
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step(self.backward.side_by_side)
        return loss


SIDES = {"plain script": PlainScript, "project": Project}


def worker(side: str, given: dict[str, Any], pipe: Connection) -> None:
    """Takes (first step, indices of each batch) and gives seconds, CPU seconds and losses, until it is told None."""
    torch.set_num_threads(given["threads"])
    torch.manual_seed(1)
    model = TranslationModel(ModelConfig(**given["config"]))
    script = SIDES[side](model, given["bfloat16"])
    while (block := pipe.recv()) is not None:
        first, batches = block
        wall, cpu, losses = time.perf_counter(), time.process_time(), []
        for step, indices in enumerate(batches, first):
            losses.append(script.step(given["encoded"], indices, RATE * min(1.0, step / WARMUP), given["ids"]))
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu, losses))


@contextlib.contextmanager
def started(given: dict[str, Any]) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for side in SIDES:
        mine, theirs = context.Pipe()
        context.Process(target=worker, args=(side, given, theirs), daemon=True).start()
        pipes[side] = mine
    yield pipes
    for pipe in pipes.values():
        pipe.send(None)


def race(given: dict[str, Any], plan: list[list[int]], block: int) -> dict[str, Any]:
    """Both sides in turn; the first block of each warms up and isn't counted."""
    targets = given["encoded"].targets
    blocks: list[dict[str, Any]] = []
    with started(given) as pipes:
        for first in range(0, len(plan), block):
            batches = plan[first : first + block]
            tokens = sum(len(targets[index]) + 1 for indices in batches for index in indices)
            sides = list(SIDES) if first // block % 2 else list(SIDES)[::-1]  # who begins changes
            found = {}
            for side in sides:
                pipes[side].send((first + 1, batches))
                seconds, cpu, losses = pipes[side].recv()
                found[side] = {"rate": tokens / seconds, "cpu_rate": tokens / cpu, "losses": losses}
            blocks.append(found)
            loss = {side: statistics.mean(found[side]["losses"]) for side in SIDES}
            typer.echo(
                f"  steps {first + 1}-{first + len(batches)}: "
                + ", ".join(f"{side} {found[side]['rate']:,.0f} tokens/s, loss {loss[side]:.3f}" for side in SIDES)
            )
    counted = blocks[1:]
    ratios = [found["project"]["rate"] / found["plain script"]["rate"] for found in counted]
    return {
        "tokens_per_second": {side: statistics.median(b[side]["rate"] for b in counted) for side in SIDES},
        "tokens_per_cpu_second": {side: statistics.median(b[side]["cpu_rate"] for b in counted) for side in SIDES},
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "pairs": len(ratios)},
        "loss": {
            side: [round(statistics.mean(b[side]["losses"]), 4) for b in blocks] for side in SIDES
        },
    }  # fmt: skip


def precisions(given: dict[str, Any], plan: list[list[int]]) -> dict[str, Any]:
    """The project's steps in fp32 and bf16, in turn, and what `auto` chooses."""
    seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    torch.set_num_threads(given["threads"])
    scripts = {}
    for name in seconds:
        torch.manual_seed(1)
        scripts[name] = Project(TranslationModel(ModelConfig(**given["config"])), name == "bfloat16")
    for step, indices in enumerate(plan[:6], 1):
        for name, script in scripts.items():
            began = time.perf_counter()
            script.step(given["encoded"], indices, 1e-5, given["ids"])
            if step > 1:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    chosen = "bfloat16" if uses_bfloat16("auto", CPU) else "float32"
    return {"seconds_a_step": medians, "faster": min(medians, key=medians.__getitem__), "auto": chosen}


EOLE = """
src_vocab: {folder}/vocab.txt
tgt_vocab: {folder}/vocab.txt
share_vocab: true
save_data: {folder}/data
overwrite: true
seed: 1
report_every: 10
data:
  corpus:
    path_src: {folder}/train.src
    path_tgt: {folder}/train.tgt
training:
  model_path: {folder}/model{steps}
  world_size: 0
  gpu_ranks: []
  num_workers: 0
  batch_type: tokens
  batch_size: {batch}
  accum_count: [1]
  bucket_size: 60000
  compute_dtype: {precision}
  optim: adamw
  learning_rate: {rate}
  warmup_steps: {warmup}
  decay_method: none
  adam_beta2: 0.98
  weight_decay: 0.01
  max_grad_norm: 1.0
  label_smoothing: 0.1
  dropout: [{dropout}]
  attention_dropout: [0.0]
  dropout_steps: [0]
  train_steps: {steps}
  valid_steps: 1000000
  save_checkpoint_steps: 1000000
  keep_checkpoint: 1
  param_init_method: xavier_uniform
model:
  architecture: transformer
  hidden_size: {width}
  transformer_ff: {inner}
  heads: {heads}
  share_embeddings: true
  share_decoder_embeddings: true
  embeddings:
    word_vec_size: {width}
    position_encoding_type: Learned
    n_positions: 256
  encoder:
    encoder_type: transformer
    layers: {encoder}
  decoder:
    decoder_type: transformer
    layers: {decoder}
"""


def eole(
    python: Path, given: dict[str, Any], tokenizer: Tokenizer, batch: int, steps: tuple[int, int]
) -> dict[str, Any]:
    """Target tokens a CPU second of eole's steps."""
    encoded, config = given["encoded"], given["config"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, part, cut in (("src", encoded.sources, 1), ("tgt", encoded.targets, 0)):
            lines = (" ".join(tokenizer.pieces(ids[: len(ids) - cut])) for ids in part)
            (folder / f"train.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pieces = tokenizer.pieces(list(range(tokenizer.vocab_size)))
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        used = []
        for count in steps:
            settings = EOLE.format(
                folder=folder, steps=count, batch=batch, rate=RATE, warmup=WARMUP, dropout=DROPOUT,
                precision="bf16" if given["bfloat16"] else "fp32", width=config["d_model"],
                inner=config["dim_feedforward"], heads=config["nhead"], encoder=config["num_encoder_layers"],
                decoder=config["num_decoder_layers"],
            )  # fmt: skip
            (folder / "run.yaml").write_text(settings)
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            environment = os.environ | {"OMP_NUM_THREADS": str(given["threads"])}
            done = subprocess.run(
                [python.with_name("eole"), "train", "-config", folder / "run.yaml"],
                capture_output=True, text=True, env=environment,
            )  # fmt: skip
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            said = done.stdout + done.stderr
            if done.returncode:
                raise SystemExit(f"eole: {said[-2000:]}")
            batches = [int(number) for number in re.findall(r"bsz:\s*\d+/\s*(\d+)/", said)]
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            used.append((count * statistics.mean(batches), time.perf_counter() - began, cpu))
        (less, wall0, cpu0), (more, wall1, cpu1) = used
    return {
        "version": "0.6.4",
        "tokens_per_second": (more - less) / (wall1 - wall0),
        "tokens_per_cpu_second": (more - less) / (cpu1 - cpu0),
        "steps": steps,
    }


def launched(count: int, threads: int, batch_tokens: int, steps: int) -> list[int]:
    """Target tokens a second that a run of `count` processes logs, every ten steps; the first ten aren't counted."""
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "output": place + "/run", "model.dropout": DROPOUT, "training.max_steps": steps, "training.log_every": 10,
            "training.batch_tokens": batch_tokens, "evaluation.every": steps, "evaluation.sentences": 1,
        }  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)] if count > 1 else []
        command = [sys.executable, *launcher, "-m", "translator", "train", "small"]
        given = [f"--set={key}={value}" for key, value in settings.items()]
        done = subprocess.run(
            [*command, *given], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"translator train: {done.stderr[-2000:]}")
        events = [json.loads(line) for line in (Path(place) / "run" / "log.jsonl").read_text().splitlines()]
    return [event["tokens_per_second"] for event in events if event["event"] == "step"][1:]


def by_processes(batch_tokens: int, threads: int, steps: int = 40, turns: int = 3) -> dict[str, Any]:
    """Tokens a second with one process of `threads` threads and with as many processes of one, in turn."""
    ways = {f"1 process of {threads} threads": (1, threads), f"{threads} processes of 1 thread": (threads, 1)}
    rates: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, (count, each) in ways.items():
            rates[name].append(round(statistics.median(launched(count, each, batch_tokens, steps))))
    one, several = rates.values()
    ratios = [b / a for a, b in zip(one, several, strict=True)]
    return {"tokens_per_second": rates, "ratio": {"median": statistics.median(ratios), "pairs": len(ratios)}}


def machine(threads: int) -> dict[str, Any]:
    """The CPU's name, and the instructions that decide."""
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", text, re.M)[1].split())  # type: ignore[index]
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.M)[1]  # type: ignore[index]
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    return {
        "cpu": name,
        "flags": [flag for flag in known if flag in flags],
        "threads": threads,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def main(
    steps: Annotated[int, typer.Option(help="Steps of the race.")] = 80,
    block: Annotated[int, typer.Option(help="Steps that one side takes before it is the other's turn.")] = 8,
    batch_tokens: int = 4096,
    threads: int = 2,
    eole_python: Annotated[Path | None, typer.Option("--eole", help="Python of an environment with eole.")] = None,
    processes: Annotated[bool, typer.Option("--processes", help="Also compare numbers of processes.")] = False,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Where the results go, as JSON.")] = None,
) -> None:
    """Race the project's training against a plain script and, where it is installed, eole."""
    recipe, base = read_recipe("small")
    data = load_data(recipe, base, lambda line: None)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT / "tokenizer.model")
    encoded = encode_pairs(prepared(data.train, tokenizer, ("en", "zh")), tokenizer)
    kept = [i for i, ids in enumerate(encoded.sources) if len(ids) < 128 > len(encoded.targets[i])]
    encoded = Encoded([encoded.sources[i] for i in kept], [encoded.targets[i] for i in kept])
    bfloat16 = uses_bfloat16(precision, CPU)
    results: dict[str, Any] = {
        "machine": machine(threads), "precision": "bfloat16" if bfloat16 else "float32", "batch_tokens": batch_tokens
    }  # fmt: skip
    typer.echo(json.dumps(results["machine"]))
    for name, layers in (("6+3 layers", (6, 3)), ("3+3 layers", (3, 3))):
        shape = {"num_encoder_layers": layers[0], "num_decoder_layers": layers[1], "dropout": DROPOUT}
        config = vars(preset("small", tokenizer.vocab_size, **shape))
        ids = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        given = {"threads": threads, "config": config, "bfloat16": bfloat16, "encoded": encoded, "ids": ids}
        plan = plan_epoch(encoded, batch_tokens, seed=1, epoch=0)[:steps]
        typer.echo(f"{name}, width {config['d_model']}, {results['precision']}")
        found = results[name] = race(given, plan, block)
        typer.echo(f"  project : plain script = {found['ratio']['median']:.2f} ({found['ratio']['least']:.2f} to "
                   f"{found['ratio']['most']:.2f}, {found['ratio']['pairs']} pairs)")  # fmt: skip
        if name == "6+3 layers":
            results["precisions"] = precisions(given, plan)
            typer.echo(f"  precision: {json.dumps(results['precisions'])}")
            if results["precisions"]["auto"] != results["precisions"]["faster"]:
                typer.echo("  precision: auto is NOT the faster one here", err=True)
        if eole_python is not None:
            found["eole"] = eole(eole_python, given, tokenizer, batch_tokens, (20, 60))
            typer.echo(f"  eole: {json.dumps(found['eole'])}; project {found['tokens_per_cpu_second']['project']:,.0f} "
                       "tokens a CPU second")  # fmt: skip
    if processes:
        results["processes"] = by_processes(batch_tokens, threads)
        typer.echo(f"processes: {json.dumps(results['processes'])}")
    if output is not None:
        atomic_write_bytes(output, (json_text(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    typer.run(main)
