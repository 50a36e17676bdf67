"""K and V of the encoder output for one layer: complete when a sentence is admitted, never written again."""

from collections.abc import Sequence

import torch
from torch import Tensor


class SourceState:
    """`(B, H_kv, S, D_head)` once for each sentence; its K hypotheses are query rows of one attention call.

    With room for the grid (`sentences`, `source_capacity` of the `CacheSpec`), `admit` writes one slot and reallocates
    nothing; `length` is how many source tokens are shown.
    """

    __slots__ = ("_k", "_v", "length")

    def __init__(self, k: Tensor, v: Tensor, *, sentences: int | None = None, capacity: int | None = None) -> None:
        """Around `k, v` `(B, H_kv, S, D_head)`; raises `ValueError` where the room asked for is too small."""
        B, _, S, _ = k.shape
        if (sentences or B) < B or (capacity or S) < S:
            raise ValueError(f"{B} sentences of {S} source tokens don't fit a grid of {sentences} by {capacity}")
        self.length = S
        if sentences is None and capacity is None:
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

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts K and V."""
        self._k, self._v = self._k.to(device, dtype), self._v.to(device, dtype)

    def select(self, sentences: Tensor) -> None:
        """Keeps the sentences with these indices, in this order."""
        self._k, self._v = self._k.index_select(0, sentences), self._v.index_select(0, sentences)

    def admit(self, slots: Sequence[int], source: "SourceState") -> None:
        """Sentences `slots` become those of `source`, in order."""
        self.length = max(self.length, source.length)
        if self.length > self._k.shape[2]:
            self._k, self._v = (_roomy(part, part.shape[0], self.length) for part in (self._k, self._v))
        with torch.inference_mode():
            for mine, theirs in ((self._k, source.k), (self._v, source.v)):
                for slot, new in zip(slots, theirs, strict=True):
                    mine[slot, :, : new.shape[1]] = new
                    mine[slot, :, new.shape[1] :] = 0

    def replaced(self, source: "SourceState") -> None:
        """Becomes a copy of `source`, of as many sentences, in the room there is; nothing is shared."""
        self.length = 0  # nothing held is needed, so that room only grows for a longer source
        self.admit(range(source.k.shape[0]), source)


def _roomy(part: Tensor, sentences: int, capacity: int) -> Tensor:
    with torch.inference_mode(False):
        room = torch.zeros(
            (sentences, part.shape[1], capacity, part.shape[3]), dtype=part.dtype, device=part.device
        )  # zeros, not rubbish: an empty slot is masked, and a mask doesn't stop NaN
    room[: part.shape[0], :, : part.shape[2]] = part
    return room
