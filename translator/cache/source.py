"""K and V of the encoder output for one layer: complete when a sentence is admitted, never written again."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor


class SourceState:
    """`(B, H_kv, S, D_head)` once for each sentence; its K hypotheses are query rows of one attention call.

    With room for the grid (`sentences`, `source_capacity` of the `CacheSpec`), `admit` writes one slot and reallocates
    nothing; `length` is how many source tokens are shown.
    """

    __slots__ = ("_k", "_v", "fixed", "length")

    def __init__(self, k: Tensor, v: Tensor, *, sentences: int | None = None, capacity: int | None = None) -> None:
        """Around `k, v` `(B, H_kv, S, D_head)`; raises `ValueError` where the room asked for is too small."""
        B, _, S, _ = k.shape
        if (sentences or B) < B or (capacity or S) < S:
            raise ValueError(f"{B} sentences of {S} source tokens don't fit a grid of {sentences} by {capacity}")
        self.length = S
        self.fixed = sentences is not None or capacity is not None
        """Whether the room is the grid's: it stays where it is and as it is, however many sentences leave."""
        if not self.fixed:
            self._k, self._v = k, v
        else:
            self._k, self._v = (_roomy(part, sentences or B, capacity or S) for part in (k, v))

    @property
    def k(self) -> Tensor:
        """`(B, H_kv, S, D_head)`."""
        return self._k if self._k.shape[2] == self.length else self._k.narrow(2, 0, self.length)

    @property
    def v(self) -> Tensor:
        """`(B, H_kv, S, D_head)`."""
        return self._v if self._v.shape[2] == self.length else self._v.narrow(2, 0, self.length)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._k.nbytes + self._v.nbytes

    def prefix(self, sentences: int, length: int) -> "SourceState":
        """The first sentences, of whom `length` source tokens are shown, in the same memory."""
        same = copy.copy(self)
        same._k, same._v, same.length = self._k.narrow(0, 0, sentences), self._v.narrow(0, 0, sentences), length
        return same

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts K and V."""
        self._k, self._v = self._k.to(device, dtype), self._v.to(device, dtype)

    def select(self, sentences: Tensor) -> None:
        """Keeps the sentences with these indices, in this order: only those that change their place are copied."""
        with torch.inference_mode():  # they may have been made in it
            self._k, self._v = (self._selected(part, sentences) for part in (self._k, self._v))

    def _selected(self, part: Tensor, sentences: Tensor) -> Tensor:
        kept = part.narrow(0, 0, len(sentences))
        if self.fixed:  # on a device, finding out which ones move would mean to wait for it
            return kept.copy_(part.index_select(0, sentences))
        places = torch.arange(len(sentences), device=sentences.device)
        moved = places[sentences != places]
        if len(moved):
            kept[moved] = part[sentences[moved]]
        return kept

    def admit(self, slots: Sequence[int], source: "SourceState") -> None:
        """Sentences `slots` become those of `source`, in order."""
        self.length = max(self.length, source.length)
        if self.length > self._k.shape[2]:
            self._k, self._v = (_roomy(part, part.shape[0], self.length) for part in (self._k, self._v))
        with torch.inference_mode():
            for mine, theirs in ((self._k, source.k), (self._v, source.v)):
                S = theirs.shape[2]
                for place, new in _runs(slots, theirs):
                    mine[place, :, :S] = new
                    mine[place, :, S:] = 0

    def replaced(self, source: "SourceState") -> None:
        """Becomes a copy of `source`, of as many sentences, in the room there is; nothing is shared."""
        self.length = 0  # nothing held is needed, so that room only grows for a longer source
        self.admit(range(source.k.shape[0]), source)


def _runs(slots: Sequence[int], sentences: Tensor) -> list[tuple[slice, Tensor]]:
    """Each sentence with its slot, or all at once where the slots are neighbours in order: a copy costs a call."""
    first, n = (slots[0] if slots else 0), len(slots)
    if list(slots) == list(range(first, first + n)):
        return [(slice(first, first + n), sentences)]
    return [(slice(slot, slot + 1), new) for slot, new in zip(slots, sentences.split(1), strict=True)]


def _roomy(part: Tensor, sentences: int, capacity: int) -> Tensor:
    with torch.inference_mode(False):
        room = torch.zeros(
            (sentences, part.shape[1], capacity, part.shape[3]), dtype=part.dtype, device=part.device
        )  # zeros, not rubbish: an empty slot is masked, and a mask doesn't stop NaN
    room[: part.shape[0], :, : part.shape[2]] = part
    return room
