"""Faults of a step: its positions, its masks, what is written and read, the source, what is computed."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from translator.attention import CachedMultiheadAttention
from translator.cache import DecoderCache, KeyValueState, LayerStep, Lengths, Step, View
from translator.cache import step as step_module
from translator.decoder import CachedDecoder
from translator.diagnostics.parity.faults import CONTAINER, FaultList, Original
from translator.operations import EagerOperations

Mask = tuple[Tensor | None, bool]

FAULTS = FaultList()


# -- positions --------------------------------------------------------------------------------------------------------


@FAULTS.add("position restarts at 0", Lengths, "positions")
def _(original: Original, self: Lengths, T: int, device: torch.device) -> Tensor:
    """Every step looks up its positions from 0 again."""
    positions = original(self, T, device)
    return positions - positions[:, :1]


@FAULTS.add("position off by one", Lengths, "positions")
def _(original: Original, self: Lengths, T: int, device: torch.device) -> Tensor:
    """Cached tokens stand one place to the right of where they are."""
    return original(self, T, device) + 1


@FAULTS.add("position of the longest row", Lengths, "positions")
def _(original: Original, self: Lengths, T: int, device: torch.device) -> Tensor:
    """Shorter rows get the longest row's positions."""
    positions = original(self, T, device)
    return positions.amax(dim=0).expand_as(positions)


# -- masks of self-attention ------------------------------------------------------------------------------------------


Past = int | Tensor
"""Tokens held: one number while all rows agree, else `(rows,)`."""


def _keys_and_queries(past: Past, T: int, visible: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Slots `(visible,)`, positions of the queries `(rows, 1, T, 1)` and lengths `(rows, 1, 1, 1)`, or rows of 1."""
    held = torch.as_tensor(past, device=device).view(-1, 1, 1, 1)
    return torch.arange(visible, device=device), held + torch.arange(T, device=device).unsqueeze(1), held


@FAULTS.add("past K/V ignored", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """A step attends to its own tokens only."""
    keys, queries, held = _keys_and_queries(past, T, visible, device)
    return (keys <= queries) & (keys >= held), False


@FAULTS.add("causal flag on in a step", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """is_causal=True on a filled cache: one query sees slot 0 alone."""
    return None, True


@FAULTS.add("causal mask top-left on a filled cache", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """Token i of a step of several sees slots 0 to i, whatever came before."""
    if T == 1:
        return original(past, T, visible, device, *view)
    return torch.ones(T, visible, dtype=torch.bool, device=device).tril(), False


@FAULTS.add("mask made from the step's length alone", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """The triangle covers the step; the past gets no column, or none of its own."""
    return torch.ones(T, T, dtype=torch.bool, device=device).tril(), False


@FAULTS.add("no triangle within a step", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """Tokens of one step see those after them."""
    keys, _, held = _keys_and_queries(past, T, visible, device)
    return (keys < held + T).expand(-1, 1, T, visible), False


@FAULTS.add("unwritten slots visible", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """The mask ends where the view ends, not where the row ends."""
    return torch.ones(T, visible, dtype=torch.bool, device=device).tril(visible - T), False


@FAULTS.add("one length for all rows", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """Rows of other lengths get the longest row's mask."""
    longest = past if isinstance(past, int) else int(past.max())
    return original(longest, T, visible, device, *view)


@FAULTS.add("oldest token forgotten", step_module, "view_mask", key_values=True)
def _(original: Original, past: Past, T: int, visible: int, device: torch.device, *view: Any) -> Mask:
    """Slot 0 is out of sight once eight tokens are held."""
    keys, queries, held = _keys_and_queries(past, T, visible, device)
    return (keys <= queries) & ((keys > 0) | (held < 8)), False


# -- what is written and read -----------------------------------------------------------------------------------------


@FAULTS.add("values stored as keys", CONTAINER, "append")
def _(original: Original, self: KeyValueState, k: Tensor, v: Tensor, step: Step, view: View) -> None:
    """The key slots get the values."""
    original(self, v, v, step, view)


@FAULTS.add("keys and values swapped", CONTAINER, "append")
def _(original: Original, self: KeyValueState, k: Tensor, v: Tensor, step: Step, view: View) -> None:
    """Each is stored in the other's place."""
    original(self, v, k, step, view)


@FAULTS.add("K/V rounded to bfloat16", CONTAINER, "append")
def _(original: Original, self: KeyValueState, k: Tensor, v: Tensor, step: Step, view: View) -> None:
    """The cache keeps fewer digits than the model computes with."""
    original(self, k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), step, view)


@FAULTS.add("slot one to the left", CONTAINER, "append")
def _(original: Original, self: KeyValueState, k: Tensor, v: Tensor, step: Step, view: View) -> None:
    """From the second step on, a token overwrites its predecessor."""
    shifted = Step(step.T, step.lengths, step.device)
    shifted.start = None if step.start is None else max(step.start - 1, 0)
    shifted.slots = None if step.slots is None else (step.slots - 1).clamp(min=0)
    original(self, k, v, shifted, view)


@FAULTS.add("growth loses old slots", CONTAINER, "begin", growing=True)
def _(original: Original, self: KeyValueState, step: Step) -> View:
    """A container that grows starts empty again."""
    before, view = self.nbytes, original(self, step)
    if self.nbytes > before:
        length = step.lengths.longest
        emptied = {name: torch.zeros_like(part) for name, part in self.read(slice(None), length).items()}
        self.write(slice(0, step.lengths.rows), emptied, length)
    return view


@FAULTS.add("slots of the longest row", DecoderCache, "begin", key_values=True)
def _(original: Original, self: DecoderCache, T: int, given: Tensor | None = None) -> Step:
    """All rows write where the longest one does."""
    step = original(self, T, given)
    if step.slots is not None:
        step.start, step.slots = self.length, None
    return step


@FAULTS.add("beams share one row", LayerStep, "attend", key_values=True)
def _(original: Original, self: LayerStep, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """All beams of a sentence store the first beam's K and V."""
    B = self.source_state.k.shape[0]
    k, v = (
        new.view(B, -1, *new.shape[1:])[:, :1].expand(-1, len(new) // B, -1, -1, -1).flatten(0, 1) for new in (k, v)
    )
    return original(self, q, k, v, *rest)


@FAULTS.add("one layer's cache used for another", DecoderCache, "begin", layers=2)
def _(original: Original, self: DecoderCache, T: int, given: Tensor | None = None) -> Step:
    """The last layer writes and reads the first layer's container."""
    step = original(self, T, given)
    step.layers[-1].state = self.states[0]
    return step


# -- the source -------------------------------------------------------------------------------------------------------


@FAULTS.add("source padding forgotten after step 1", DecoderCache, "begin")
def _(original: Original, self: DecoderCache, T: int, given: Tensor | None = None) -> Step:
    """Only the first step masks the source's padding."""
    step = original(self, T, given)
    if self.length:
        step.source_mask = None
    return step


@FAULTS.add("last source token lost", CachedDecoder, "start")
def _(
    original: Original,
    self: CachedDecoder,
    memory: Tensor,
    memory_key_padding_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> DecoderCache:
    """The cross cache is one token shorter than the longest source."""
    axis = 1 if self.batch_first else 0
    length = max(memory.shape[axis] - 1, 1)
    hidden = None if memory_key_padding_mask is None else memory_key_padding_mask[:, :length]
    return original(self, memory.narrow(axis, 0, length), hidden, *rest, **options)


@FAULTS.add("beams ask another sentence's source", CachedMultiheadAttention, "attend_source")
def _(
    original: Original,
    self: CachedMultiheadAttention,
    x: Tensor,
    step: Any,
    ops: Any,
    *,
    residual: Tensor | None = None,
    **around: Any,
) -> Tensor:
    """Rows are taken for (beam, sentence) where they are (sentence, beam)."""
    if not isinstance(step, LayerStep):
        return original(self, x, step, ops, residual=residual, **around)
    B = step.source_state.k.shape[0]
    grid = x.view(-1, B, *x.shape[1:]).transpose(0, 1)
    attended = original(self, grid.reshape(x.shape), step, ops, **around).view(grid.shape)
    attended = attended.transpose(0, 1).reshape(x.shape)
    return attended if residual is None else residual + attended


# -- what is computed -------------------------------------------------------------------------------------------------


@FAULTS.add("final norm skipped", CachedDecoder, "step", norm=True)
def _(original: Original, self: CachedDecoder, *args: Any, **options: Any) -> Tensor:
    """A cached step leaves out the decoder's last LayerNorm."""
    with mock.patch.object(self, "norm", None):
        return original(self, *args, **options)


@FAULTS.add("attention scale missing", EagerOperations, "attention", key_values=True)
def _(original: Original, q: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Scores aren't divided by √D_head, with a cache and without: only another implementation tells."""
    return original(q * q.shape[-1] ** 0.5, *rest, **options)
