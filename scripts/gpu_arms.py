"""What `gpu_checks.py` measures with: models of random weights, ways of decoding, time as the device sees it."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from translator.cache import CacheSpec
from translator.config import DecodeConfig, preset
from translator.engine.base import Engine
from translator.engine.eager import EagerEngine
from translator.engine.graphs import GraphEngine, as_it_is
from translator.model import TranslationModel
from translator.padding import padding
from translator.search import Sentence, search

START, END = 2, 3
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Marks:
    """Instants on a device: CUDA events, or the clock where there are none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Now, in the order of what the device was told to do; nothing waits."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def between(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the last."""
        pairs = itertools.pairwise(self.marks)
        if self.device.type != "cuda":
            return [1e3 * (later - earlier) for earlier, later in pairs]
        torch.cuda.synchronize(self.device)
        return [earlier.elapsed_time(later) for earlier, later in pairs]


def models(small: bool, device: torch.device) -> dict[str, TranslationModel]:
    """Random ones by name: the source text's model, and a base-size Transformer."""
    sizes: dict[str, dict[str, int]] = {
        "xianyan": {},
        "base": {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "num_encoder_layers": 6, "num_decoder_layers": 6},
    }
    if small:
        shape = {"nhead": 2, "dim_feedforward": 64, "num_encoder_layers": 1, "num_decoder_layers": 2}
        sizes = {"xianyan": {"d_model": 32, **shape}, "base": {"d_model": 48, **shape}}
    made = {}
    for name, changes in sizes.items():
        torch.manual_seed(0)
        config = preset("xianyan", 200 if small else 16_000, max_positions=64 if small else 1024, **changes)
        made[name] = TranslationModel(config).eval().requires_grad_(False).to(device)
    return made


def engines(model: TranslationModel, types: tuple[str, ...]) -> dict[str, Engine]:
    """Ways of running it with a cache, by name and type."""
    found: dict[str, Engine] = {}
    for name in types:
        found[f"graphs {name}"] = GraphEngine(model, TYPES[name])
        found[f"graphs not captured {name}"] = GraphEngine(model, TYPES[name], recorder=as_it_is)
        found[f"eager {name}"] = EagerEngine(found[f"graphs {name}"].model)  # type: ignore[attr-defined]
    return found


def sources(model: TranslationModel, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids `(batch, length)` of sentences of `length` tokens down to half of it, and their padding."""
    random = torch.Generator().manual_seed(batch)
    ids = torch.randint(4, model.config.vocab_size, (batch, length), generator=random)
    hidden = padding([length - index % (length // 2 + 1) for index in range(batch)])
    device = model.embedding.weight.device
    return ids.to(device), hidden.to(device)


@torch.no_grad()
def greedy_times(engine: Engine, ids: Tensor, hidden: Tensor, tokens: int, capacity: int) -> list[float]:
    """Milliseconds of each of `tokens` steps, the best token chosen on the device and fed without waiting."""
    decoding = engine.start(engine.encode(ids, hidden), hidden, CacheSpec(kind="static", capacity=capacity))
    chosen = torch.full((len(ids),), START, device=ids.device)
    marks = Marks(ids.device)
    marks.mark()
    for _ in range(tokens):
        chosen = decoding.step(chosen).top(1)[1][:, 0]
        marks.mark()
    return marks.between()


@torch.no_grad()
def uncached_times(model: TranslationModel, ids: Tensor, hidden: Tensor, tokens: int) -> list[float]:
    """As `greedy_times`, the whole prefix through the decoder at each step."""
    memory = model.encode(ids, hidden)
    held = torch.full((len(ids), tokens + 1), START, device=ids.device)
    marks = Marks(ids.device)
    marks.mark()
    for t in range(tokens):
        held[:, t + 1] = model.logits(model.decode(held[:, : t + 1], memory, hidden)[:, -1]).argmax(dim=-1)
        marks.mark()
    return marks.between()


def search_seconds(engine: Engine, ids: Tensor, hidden: Tensor, tokens: int, beams: int) -> float:
    """A whole search from sources to targets of `tokens` tokens, as a user runs it: the end token never comes."""
    config = DecodeConfig(beam_size=beams)
    sentence = Sentence(max_length=tokens, start_id=START, end_id=END, suppressed=(0, 1, START, END))
    marks = Marks(ids.device)
    marks.mark()
    with torch.no_grad():
        spec = CacheSpec(kind="static", capacity=engine.max_positions, beams=beams)
        decoding = engine.start(engine.encode(ids, hidden), hidden, spec)
    search(decoding, [sentence] * len(ids), config)
    marks.mark()
    return sum(marks.between()) / 1e3


def transformers_seconds(model: TranslationModel, ids: Tensor, tokens: int, dtype: torch.dtype) -> Callable[[], float]:
    """Transformers' Marian of the same sizes, static cache, compiled where it compiles: seconds of one generate."""
    from transformers import MarianConfig, MarianMTModel

    c = model.config
    config = MarianConfig(
        vocab_size=c.vocab_size, d_model=c.d_model, encoder_layers=c.num_encoder_layers,
        decoder_layers=c.num_decoder_layers, encoder_attention_heads=c.nhead, decoder_attention_heads=c.nhead,
        encoder_ffn_dim=c.dim_feedforward, decoder_ffn_dim=c.dim_feedforward, max_position_embeddings=c.max_positions,
        pad_token_id=0, eos_token_id=END, decoder_start_token_id=START, forced_eos_token_id=None,
    )  # fmt: skip
    marian = MarianMTModel(config).eval().to(ids.device, dtype)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": 1}

    @torch.no_grad()
    def run() -> float:
        marks = Marks(ids.device)
        marks.mark()
        marian.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **options)
        marks.mark()
        return sum(marks.between()) / 1e3

    return run


def summary(times: list[float]) -> dict[str, float]:
    """Of one pass's tokens, without the first, which also waits for the encoder."""
    later = sorted(times[1:])
    return {
        "median_ms": statistics.median(later),
        "least_ms": later[0],
        "p95_ms": later[-(-95 * len(later) // 100) - 1],
        "first_ms": times[0],
        "last_tenth_ms": statistics.median(times[-max(len(times) // 10, 1) :]),
    }


def step_bytes(model: TranslationModel, size: int, rows: int, target: int, source: int) -> dict[str, int]:
    """Bytes that a step has to read at `size` bytes a number: weights of decoder and logits, K and V it attends to."""
    c = model.config
    skipped = sum(w.numel() for layer in model.decoder.stack for w in _kv(layer.multihead_attn, c.d_model))
    weights = sum(p.numel() for p in model.decoder.parameters()) - skipped + model.embedding.weight.numel()
    kept = 2 * c.num_decoder_layers * c.d_model * rows
    return {"weights": size * weights, "target_kv": size * kept * target, "source_kv": size * kept * source}


def _kv(attention: Any, width: int) -> Iterator[Tensor]:
    """What projects the source: used once a sentence and not by a step."""
    yield attention.in_proj_weight[width:]
    yield attention.in_proj_bias[width:]


@contextmanager
def warm(device: torch.device) -> Iterator[None]:
    """Nothing left to do on the device before or after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
