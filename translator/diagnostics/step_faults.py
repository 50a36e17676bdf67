"""Faults of a step: its positions, its masks, what is written and read, the source, what is computed."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from translator import decoder_layer
from translator.cache import DecoderCache, DynamicCache, LayerStep, StaticCache, Step, decoder_cache
from translator.cache.base import Lengths
from translator.cache.dense import DenseCache
from translator.decoder import CachedDecoder
from translator.decoder_layer import CachedDecoderLayer
from translator.diagnostics.faults import FaultList, Original
from translator.model import Positions

Mask = tuple[Tensor | None, bool]

FAULTS = FaultList()


# -- positions --------------------------------------------------------------------------------------------------------
# Only positions that come from a cache have a row dimension.


@FAULTS.add("position restarts at 0", Positions, "forward")
def _(original: Original, self: Positions, positions: Tensor) -> Tensor:
    """Every step looks up its positions from 0 again."""
    return original(self, positions - positions[:, :1] if positions.dim() == 2 else positions)


@FAULTS.add("position off by one", Positions, "forward")
def _(original: Original, self: Positions, positions: Tensor) -> Tensor:
    """Cached tokens stand one place to the right of where they are."""
    return original(self, positions + 1 if positions.dim() == 2 else positions)


@FAULTS.add("position of the longest row", Positions, "forward")
def _(original: Original, self: Positions, positions: Tensor) -> Tensor:
    """Shorter rows get the longest row's positions."""
    return original(self, positions.amax(dim=0).expand_as(positions) if positions.dim() == 2 else positions)


# -- masks of self-attention ------------------------------------------------------------------------------------------


def _keys_and_queries(lengths: Lengths, T: int, visible: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Slots `(visible,)`, positions of the queries `(rows, 1, T, 1)` and lengths `(rows, 1, 1, 1)`."""
    past = lengths.tensor().to(device).view(-1, 1, 1, 1)
    return torch.arange(visible, device=device), past + torch.arange(T, device=device).unsqueeze(1), past


@FAULTS.add("past K/V ignored", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """A step attends to its own tokens only."""
    keys, queries, past = _keys_and_queries(lengths, T, visible, device)
    return (keys <= queries) & (keys >= past), False


@FAULTS.add("causal flag on in a step", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """is_causal=True on a filled cache: one query sees slot 0 alone."""
    return None, True


@FAULTS.add("causal mask top-left on a filled cache", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """Token i of a step of several sees slots 0 to i, whatever came before."""
    if T == 1:
        return original(lengths, T, visible, device)
    return torch.ones(T, visible, dtype=torch.bool, device=device).tril(), False


@FAULTS.add("mask made from the step's length alone", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """The triangle covers the step; the past gets no column, or none of its own."""
    return torch.ones(T, T, dtype=torch.bool, device=device).tril(), False


@FAULTS.add("no triangle within a step", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """Tokens of one step see those after them."""
    keys, _, past = _keys_and_queries(lengths, T, visible, device)
    return (keys < past + T).expand(-1, 1, T, visible), False


@FAULTS.add("unwritten slots visible", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """The mask ends where the view ends, not where the row ends."""
    return torch.ones(T, visible, dtype=torch.bool, device=device).tril(visible - T), False


@FAULTS.add("one length for all rows", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """Rows of other lengths get the longest row's mask."""
    return original(Lengths(lengths.rows, lengths.longest), T, visible, device)


@FAULTS.add("oldest token forgotten", decoder_cache, "step_mask")
def _(original: Original, lengths: Lengths, T: int, visible: int, device: torch.device) -> Mask:
    """Slot 0 is out of sight once eight tokens are held."""
    keys, queries, past = _keys_and_queries(lengths, T, visible, device)
    return (keys <= queries) & ((keys > 0) | (past < 8)), False


# -- what is written and read -----------------------------------------------------------------------------------------


@FAULTS.add("values stored as keys", DenseCache, "append")
def _(original: Original, self: DenseCache, k: Tensor, v: Tensor, step: Step) -> None:
    """The key slots get the values."""
    original(self, v, v, step)


@FAULTS.add("keys and values swapped", DenseCache, "append")
def _(original: Original, self: DenseCache, k: Tensor, v: Tensor, step: Step) -> None:
    """Each is stored in the other's place."""
    original(self, v, k, step)


@FAULTS.add("K/V rounded to bfloat16", DenseCache, "append")
def _(original: Original, self: DenseCache, k: Tensor, v: Tensor, step: Step) -> None:
    """The cache keeps fewer digits than the model computes with."""
    original(self, k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), step)


@FAULTS.add("static slot one to the left", StaticCache, "append")
def _(original: Original, self: StaticCache, k: Tensor, v: Tensor, step: Step) -> None:
    """From the second step on, a token overwrites its predecessor."""
    start = None if step.start is None else max(step.start - 1, 0)
    slots = None if step.slots is None else (step.slots - 1).clamp(min=0)
    original(self, k, v, replace(step, start=start, slots=slots))


@FAULTS.add("growth loses old slots", DynamicCache, "reserve")
def _(original: Original, self: DynamicCache, length: int, block: int) -> int:
    """A container that grows starts empty again."""
    before, visible = self.slots, original(self, length, block)
    if self.slots > before:
        self.k.zero_()
        self.v.zero_()
    return visible


@FAULTS.add("slots of the longest row", DecoderCache, "begin")
def _(original: Original, self: DecoderCache, T: int, *, block: int = 1) -> Step:
    """All rows write where the longest one does."""
    step = original(self, T, block=block)
    if step.slots is not None:
        step.start, step.slots = self.length, None
    return step


@FAULTS.add("beams share one row", LayerStep, "update")
def _(original: Original, self: LayerStep, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """All beams of a sentence store the first beam's K and V."""
    B = self.cache.cross_attn.k.shape[0]
    k, v = (
        new.view(B, -1, *new.shape[1:])[:, :1].expand(-1, len(new) // B, -1, -1, -1).flatten(0, 1) for new in (k, v)
    )
    return original(self, k, v)


@FAULTS.add("one layer's cache used for another", DecoderCache, "begin", layers=2)
def _(original: Original, self: DecoderCache, T: int, *, block: int = 1) -> Step:
    """The last layer writes and reads the first layer's container."""
    step = original(self, T, block=block)
    step.layers[-1] = LayerStep(replace(self.layers[-1], self_attn=self.layers[0].self_attn), step)
    return step


# -- the source -------------------------------------------------------------------------------------------------------


@FAULTS.add("source padding forgotten after step 1", DecoderCache, "begin")
def _(original: Original, self: DecoderCache, T: int, *, block: int = 1) -> Step:
    """Only the first step masks the source's padding."""
    step = original(self, T, block=block)
    if self.length:
        step.source_mask = None
    return step


@FAULTS.add("last source token lost", CachedDecoder, "start")
def _(
    original: Original,
    self: CachedDecoder,
    memory: Tensor,
    memory_key_padding_mask: Tensor | None = None,
    **options: Any,
) -> DecoderCache:
    """The cross cache is one token shorter than the longest source."""
    length = max(memory.shape[1] - 1, 1)
    hidden = None if memory_key_padding_mask is None else memory_key_padding_mask[:, :length]
    return original(self, memory[:, :length], hidden, **options)


@FAULTS.add("beams ask another sentence's source", CachedDecoderLayer, "_cross_attention")
def _(original: Original, self: CachedDecoderLayer, x: Tensor, source: Any, *rest: Any) -> Tensor:
    """Rows are taken for (beam, sentence) where they are (sentence, beam)."""
    if not isinstance(source, LayerStep):
        return original(self, x, source, *rest)
    B = source.cache.cross_attn.k.shape[0]
    grid = x.view(-1, B, *x.shape[1:]).transpose(0, 1)
    attended = original(self, grid.reshape(x.shape), source, *rest).view(grid.shape)
    return attended.transpose(0, 1).reshape(x.shape)


# -- what is computed -------------------------------------------------------------------------------------------------


@FAULTS.add("final norm skipped", CachedDecoder, "_step")
def _(original: Original, self: CachedDecoder, *args: Any, **options: Any) -> Tensor:
    """A cached step leaves out the decoder's last LayerNorm."""
    with mock.patch.object(self, "norm", None):
        return original(self, *args, **options)


@FAULTS.add("attention scale missing", decoder_layer, "attend")
def _(original: Original, q: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Scores aren't divided by √D_head, with a cache and without: only PyTorch's own decoder tells."""
    return original(q * q.shape[-1] ** 0.5, *rest, **options)
