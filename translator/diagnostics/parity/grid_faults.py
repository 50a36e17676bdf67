"""Faults of what happens to a cache between steps: beams that move, sentences that come and go, tokens taken back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from translator.cache import DecoderCache, KeyValueState, LayerState, Lengths, SourceState, Step
from translator.diagnostics.parity.faults import CONTAINER, FaultList, Original

FAULTS = FaultList()
ALL = slice(None)


def _first(count: int) -> Tensor:
    return torch.arange(count)


def _held(state: LayerState, length: int) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in state.read(ALL, length).items()}


def _rows(state: LayerState) -> int:
    return len(next(iter(state.read(ALL, 0).values())))


# -- beams ------------------------------------------------------------------------------------------------------------


@FAULTS.add("reorder skipped", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """Rows stay where they are."""


@FAULTS.add("reorder across sentences", DecoderCache, "reorder")
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """The batch offset is forgotten: every sentence gets rows of the first."""
    self._select_rows(beam.reshape(-1))


@FAULTS.add("reorder of keys alone", CONTAINER, "select", by_reference=False)
def _(original: Original, self: KeyValueState, rows: Tensor, length: int) -> None:
    """Values stay where they are."""
    before = _held(self, length)
    original(self, rows, length)
    keys, *others = before
    stay = {name: before[name][: len(rows)] for name in others}
    self.write(slice(0, len(rows)), {keys: _held(self, length)[keys], **stay}, length)


@FAULTS.add("reorder skipped in the last layer", DecoderCache, "reorder", layers=2, by_reference=False)
def _(original: Original, self: DecoderCache, beam: Tensor) -> None:
    """One layer's rows stay where they are."""
    last = self.states[-1]
    before = _held(last, self.length)
    original(self, beam)
    last.write(slice(0, self.rows), before, self.length)


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


@FAULTS.add("rows expanded as a block", CONTAINER, "expand", by_reference=False)
def _(original: Original, self: KeyValueState, beams: int, length: int) -> None:
    """Row r becomes row r of each copy of the batch, not a neighbour of its copies."""
    before = _held(self, length)
    original(self, beams, length)
    blocks = {name: torch.cat([part] * beams) for name, part in before.items()}
    self.write(slice(0, _rows(self)), blocks, length)


# -- sentences --------------------------------------------------------------------------------------------------------


@FAULTS.add("cross cache not compacted", SourceState, "select")
def _(original: Original, self: SourceState, sentences: Tensor) -> None:
    """The first sentences' K and V stay, whichever went on."""
    original(self, _first(len(sentences)).to(sentences.device))


@FAULTS.add("self-attention cache not compacted", CONTAINER, "select")
def _(original: Original, self: KeyValueState, rows: Tensor, length: int) -> None:
    """The first rows stay when sentences leave, whichever went on."""
    original(self, rows if len(rows) == _rows(self) else _first(len(rows)).to(rows.device), length)


@FAULTS.add("source padding not compacted", DecoderCache, "compact")
def _(original: Original, self: DecoderCache, keep: Tensor) -> None:
    """The first sentences' padding masks stay, whichever went on."""
    visible = None if self.source_visible is None else self.source_visible.clone()
    original(self, keep)
    self.source_visible = None if visible is None else visible[: self.batch_size]


@FAULTS.add("finished sentence still advanced", DecoderCache, "compact")
def _(original: Original, self: DecoderCache, keep: Tensor) -> None:
    """A sentence that is done keeps its place, and one that isn't loses it."""
    original(self, _first(len(keep)))


@FAULTS.add("admit keeps the old source's padding", DecoderCache, "admit")
def _(original: Original, self: DecoderCache, slots: list[int], source: DecoderCache) -> None:
    """The newcomer's source is masked as the leaver's was."""
    old = self.source_visible
    original(self, slots, source)
    if old is not None and self.source_visible is not None:
        self.source_visible[slots] = False
        self.source_visible[slots, : old.shape[1]] = old[slots]


@FAULTS.add("admit keeps the old length", DecoderCache, "admit")
def _(original: Original, self: DecoderCache, slots: list[int], source: DecoderCache) -> None:
    """The newcomer goes on at the leaver's length."""
    lengths = self._lengths
    original(self, slots, source)
    self._lengths = lengths


@FAULTS.add("admit keeps the old K/V", CONTAINER, "admit")
def _(original: Original, self: KeyValueState, rows: slice, source: LayerState, theirs: slice, length: int) -> None:
    """The newcomer finds the leaver's tokens."""


@FAULTS.add("admit keeps the old source", SourceState, "admit")
def _(original: Original, self: SourceState, slots: Sequence[int], source: SourceState) -> None:
    """The newcomer attends to the leaver's source."""
    before = [(slot, self.k[slot].clone(), self.v[slot].clone()) for slot in slots]
    original(self, slots, source)
    for slot, k, v in before:
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


@FAULTS.add("stale rows after crop", CONTAINER, "clear", by_reference=False)
def _(original: Original, self: KeyValueState, lengths: Lengths, until: int) -> None:
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
