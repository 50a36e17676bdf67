"""Faults of what happens to a cache between steps: beams that move, sentences that come and go, tokens taken back."""

from typing import Any

import torch
from torch import Tensor

from translator.cache import CrossAttentionCache, DecoderCache, Step
from translator.cache.base import Lengths
from translator.cache.dense import DenseCache
from translator.diagnostics.faults import FaultList, Original

FAULTS = FaultList()


def _first(count: int) -> Tensor:
    return torch.arange(count)


# -- beams ------------------------------------------------------------------------------------------------------------


@FAULTS.add("reorder skipped", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """Rows stay where they are."""


@FAULTS.add("reorder across sentences", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """The batch offset is forgotten: every sentence gets rows of the first."""
    self._select_rows(beam.reshape(-1))


@FAULTS.add("reorder of keys alone", DenseCache, "select")
def _(original: Original, self: DenseCache, rows: Tensor, length: int) -> None:
    """Values stay where they are."""
    v = self.v[: len(rows)].clone()
    original(self, rows, length)
    self.v = v


@FAULTS.add("reorder skipped in the last layer", DecoderCache, "reorder", layers=2)
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """One layer's rows stay where they are."""
    last = self.layers[-1].self_attn
    assert isinstance(last, DenseCache)
    k, v = last.k.clone(), last.v.clone()
    original(self, beam)
    last.k, last.v = k, v


@FAULTS.add("reorder the wrong way round", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """A row is sent where it should have come from."""
    original(self, beam.argsort(dim=1))


@FAULTS.add("lengths not reordered", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """Rows move and their lengths don't."""
    lengths = self._lengths
    original(self, beam)
    self._lengths = lengths


@FAULTS.add("rows expanded as a block", DenseCache, "expand")
def _(original: Original, self: DenseCache, beams: int, length: int) -> None:
    """Row r becomes row r of each copy of the batch, not a neighbour of its copies."""
    self.k, self.v = self.k.repeat(beams, 1, 1, 1), self.v.repeat(beams, 1, 1, 1)


# -- sentences --------------------------------------------------------------------------------------------------------


@FAULTS.add("cross cache not compacted", CrossAttentionCache, "select")
def _(original: Original, self: CrossAttentionCache, sentences: Tensor) -> None:
    """The first sentences' K and V stay, whichever went on."""
    original(self, _first(len(sentences)).to(sentences.device))


@FAULTS.add("self-attention cache not compacted", DenseCache, "select")
def _(original: Original, self: DenseCache, rows: Tensor, length: int) -> None:
    """The first rows stay when sentences leave, whichever went on."""
    original(self, rows if len(rows) == len(self.k) else _first(len(rows)).to(rows.device), length)


@FAULTS.add("source padding not compacted", DecoderCache, "compact")
def _(original: Original, self: DecoderCache, keep: Tensor) -> None:
    """The first sentences' padding masks stay, whichever went on."""
    visible = self.source_visible
    original(self, keep)
    self.source_visible = None if visible is None else visible[: self.batch_size]


@FAULTS.add("finished sentence still advanced", DecoderCache, "compact")
def _(original: Original, self: DecoderCache, keep: Tensor) -> None:
    """A sentence that is done keeps its place, and one that isn't loses it."""
    original(self, _first(len(keep)))


@FAULTS.add("admit keeps the old source's padding", DecoderCache, "admit")
def _(original: Original, self: DecoderCache, slot: int, source: DecoderCache) -> None:
    """The newcomer's source is masked as the leaver's was."""
    old = self.source_visible
    original(self, slot, source)
    if old is not None and self.source_visible is not None:
        self.source_visible[slot] = False
        self.source_visible[slot, : old.shape[1]] = old[slot]


@FAULTS.add("admit keeps the old length", DecoderCache, "admit")
def _(original: Original, self: DecoderCache, slot: int, source: DecoderCache) -> None:
    """The newcomer goes on at the leaver's length."""
    lengths = self._lengths
    original(self, slot, source)
    self._lengths = lengths


@FAULTS.add("admit keeps the old K/V", DenseCache, "admit")
def _(original: Original, self: DenseCache, rows: range, source: DenseCache, length: int) -> None:
    """The newcomer finds the leaver's tokens."""


@FAULTS.add("admit keeps the old source", CrossAttentionCache, "admit")
def _(original: Original, self: CrossAttentionCache, slot: int, source: CrossAttentionCache, length: int) -> None:
    """The newcomer attends to the leaver's source."""
    k, v = self.k[slot].clone(), self.v[slot].clone()
    original(self, slot, source, length)
    self.k[slot, :, : k.shape[1]], self.v[slot, :, : v.shape[1]] = k, v


# -- tokens taken back ------------------------------------------------------------------------------------------------


@FAULTS.add("step committed twice", DecoderCache, "commit")
def _(original: Original, self: DecoderCache, step: Step) -> None:
    """Lengths advance by twice the step."""
    original(self, step)
    self._lengths = self._lengths.advanced(step.T)


@FAULTS.add("reset that keeps the length", DecoderCache, "reset")
def _(original: Original, self: DecoderCache, source: DecoderCache | None = None) -> None:
    """K and V are emptied, and the next token is put behind them."""
    lengths = self._lengths
    original(self, source)
    self._lengths = lengths


@FAULTS.add("reset that keeps the source", DecoderCache, "reset")
def _(original: Original, self: DecoderCache, source: DecoderCache | None = None) -> None:
    """The next sentences are decoded from the last ones' source."""
    original(self)


@FAULTS.add("reset that keeps the source's padding", DecoderCache, "reset")
def _(original: Original, self: DecoderCache, source: DecoderCache | None = None) -> None:
    """The next sources are masked as the last ones were."""
    old = self.source_visible
    original(self, source)
    if old is not None and self.source_visible is not None:
        fresh = self.source_visible.clone()
        width = min(old.shape[1], fresh.shape[1])
        fresh[:, :width] = old[:, :width]
        self.source_visible = fresh


@FAULTS.add("stale rows after crop", DenseCache, "clear")
def _(original: Original, self: DenseCache, lengths: Lengths, until: int) -> None:
    """Tokens taken back stay in their slots, masked; a NaN among them gets through the mask."""


@FAULTS.add("crop to the longest", DecoderCache, "crop")
def _(original: Original, self: DecoderCache, lengths: Any) -> None:
    """Rows shortened to different lengths all get the longest one they can have."""
    wanted = torch.as_tensor(lengths)
    original(self, self.lengths.clamp(max=int(wanted.max())))


@FAULTS.add("crop shortens the record alone", DecoderCache, "crop")
def _(original: Original, self: DecoderCache, lengths: Any) -> None:
    """Lengths stay as they were: the tokens taken back are empty slots in the middle."""
    before = self._lengths
    original(self, lengths)
    self._lengths = before


@FAULTS.add("abandoned step keeps its length", DecoderCache, "rollback")
def _(original: Original, self: DecoderCache) -> None:
    """A step that was taken back advances the lengths all the same."""
    step = self._open
    original(self)
    if step is not None:
        self._lengths = self._lengths.advanced(step.T)
