"""Decoders without a translation model around them: one of PyTorch's, and a step by its position."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from decoding.systems import PAD, START, Missing, Project

WIDTH, HEADS, LAYERS, SOURCE = 512, 8, 6, 40


def plain_decoder(kind: str, tokens: int, threads: int) -> Callable[[], float]:
    """A call that runs `tokens` steps of a plain `nn.TransformerDecoder`, 6 layers of 512, and gives its last output.

    `kind`: "uncached" is PyTorch's own module on the whole prefix at each step, "cached" `CachedDecoder.from_torch`,
    else the compute type it is packed to.
    """
    import torch
    from torch import nn

    from translator.decoder import CachedDecoder

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    decoder = nn.TransformerDecoder(layer, LAYERS).eval()
    memory, x = torch.randn(1, SOURCE, WIDTH), torch.randn(1, tokens, WIDTH)

    @torch.inference_mode()
    def uncached() -> float:
        for length in range(1, tokens + 1):
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            hidden = decoder(x[:, :length], memory, tgt_mask=mask, tgt_is_causal=True)
        return float(hidden[0, -1].norm())

    if kind == "uncached":
        return uncached
    stepped: Any = CachedDecoder.from_torch(decoder)
    if kind != "cached":
        if not hasattr(stepped, "packed"):
            raise Missing("this version packs no plain decoders")
        stepped = stepped.packed(kind)

    @torch.inference_mode()
    def cached() -> float:
        cache = stepped.start(memory)
        for place in range(tokens):
            hidden = stepped(x[:, place : place + 1], cache)
        return float(hidden[0, -1].norm())

    return cached


def position_cost(system: Project, near: int, far: int, steps: int) -> dict[str, float]:
    """Milliseconds of a token at `near` and `far` tokens decoded, of steps in turn, and the bytes that lie between.

    K and V of the tokens between are what the later step reads more; their type is taken to be fp32.
    """
    import torch

    from translator.cache import CacheSpec

    model = system.translator.config.model
    spec = CacheSpec.for_targets(system.cache, system.engine.max_positions)
    token = torch.tensor([START + 2])

    def decoding(length: int) -> Any:
        memory = system.engine.encode(torch.full((1, SOURCE), START + 2), None)
        started = system.engine.start(memory, None, spec)
        for _ in range(length):
            started.step(token).top(1)
        return started

    decodings = {"near": decoding(near), "far": decoding(far)}
    times: dict[str, list[float]] = {name: [] for name in decodings}
    for _ in range(steps):
        for name, started in decodings.items():
            for repeat in range(2):
                began = time.perf_counter()
                started.step(token).top(1, torch.tensor([[PAD]]))
                if repeat:  # the first of two brings its own weights and K and V back into the processor's caches
                    times[name].append(1e3 * (time.perf_counter() - began))
    added = (far - near) * model.num_decoder_layers * 2 * model.d_model * 4
    near_ms, far_ms = (statistics.median(times[name]) for name in ("near", "far"))
    return {"near_ms": near_ms, "far_ms": far_ms, "added_ms": far_ms - near_ms, "added_bytes": added}


def read_bandwidth(threads: int, megabytes: int = 256) -> float:
    """Bytes a second of summing a large fp32 array, the best of several passes."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(megabytes << 18)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best
