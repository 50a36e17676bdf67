"""State of structures that keep one entry for every so many tokens, and the newest tokens beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from translator.cache.dense import normal_tensors
from translator.cache.layer_step import LayerStep
from translator.cache.lengths import Lengths
from translator.cache.named import NamedState
from translator.cache.state import CacheFullError
from translator.cache.step import Step, View


class CompressedState(NamedState):
    """Entries `(rows, slots, width)`, one for each `rate` tokens of a row, and tensors of a fixed size by name.

    A row of n tokens has `n // rate` entries; those of a step are written by `emit`. Invariant between steps: slots
    beyond a row's entries are zero. What is named (a window of the newest tokens, the tokens of an unfinished entry) is
    replaced by each step as in a `NamedState`, so that rows can be emptied and not shortened.
    """

    kind = "compressed"
    first_slots = 8

    def __init__(
        self,
        rows: int,
        shapes: dict[str, tuple[int, ...]],
        *,
        rate: int,
        width: int,
        capacity: int | None = None,
        limit: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`shapes` are those of one row; room is made for `capacity` tokens at first, and for `limit` at most."""
        super().__init__(rows, shapes, dtype=dtype, device=device)
        self.rate, self.limit = rate, limit
        with normal_tensors():
            self.entries = torch.zeros((rows, self.slots_for(rate, capacity, 0), width), dtype=dtype, device=device)

    @classmethod
    def slots_for(cls, rate: int, capacity: int | None, length: int) -> int:
        """Entries there is room for once a row has held `length` tokens."""
        slots = cls.first_slots if capacity is None else max(capacity // rate, 1)
        while slots < length // rate:
            slots *= 2
        return slots

    @property
    def nbytes(self) -> int:
        """Bytes allocated, for entries that have been made or not."""
        return super().nbytes + self.entries.untyped_storage().nbytes()

    def check_room(self, length: int) -> None:
        """Raises `CacheFullError` beyond the limit."""
        if self.limit is not None and length > self.limit:
            raise CacheFullError(
                f"compressed cache is full: {length} tokens are needed and capacity is {self.limit}; "
                "start it with a larger capacity or a kind that grows"
            )

    def begin(self, step: Step) -> View:
        """Room for the entries that the step will make."""
        self.check_room(step.end)
        self._reserve(step.end // self.rate)
        return super().begin(step)

    def emit(self, step: LayerStep, entries: Tensor) -> Tensor:
        """Writes each row's new entries behind those it has; returns all there are, `(rows, longest, width)`.

        `entries` `(rows, most, width)` may have more places than a row has new entries: those are zero.
        """
        whole, rate = step.step, self.rate
        if whole.start is not None:
            first, end = whole.start // rate, whole.end // rate
            self.entries[:, first:end] = entries[:, : end - first]
        elif entries.shape[1]:
            held = whole.lengths.tensor().to(entries.device).unsqueeze(1)
            places = held // rate + torch.arange(entries.shape[1], device=entries.device)  # (rows, most)
            rows, new = (places < (held + whole.T) // rate).nonzero(as_tuple=True)
            self.entries[rows, places[rows, new]] = entries[rows, new].to(self.entries.dtype)
        return self.entries[:, : whole.end // rate]

    def rollback(self, step: Step) -> None:
        """The new tensors are dropped, and the entries of the step zeroed."""
        super().rollback(step)
        self._forget(step.lengths, step.end)

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row, neighbours first."""
        super().expand(beams, length)
        with normal_tensors():
            self.entries = self.entries.repeat_interleave(beams, dim=0)

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`."""
        super().select(rows, length)
        with normal_tensors():
            self.entries = self.entries.index_select(0, rows)

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """The rows' tensors, and their `entries`."""
        return {**super().read(rows, length), "entries": self.entries[rows, : length // self.rate]}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`."""
        named = {name: part for name, part in contents.items() if name != "entries"}
        if len(named) == len(contents):
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        super().write(rows, named, length)
        count = contents["entries"].shape[1]
        self._reserve(count)
        self.entries[rows, :count] = contents["entries"]
        self.entries[rows, count:] = 0

    def clear(self, lengths: Lengths, until: int) -> None:
        """Empties every row."""
        super().clear(lengths, until)
        self._forget(lengths, until)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts all that is held."""
        super().to(device, dtype)
        with normal_tensors():
            self.entries = self.entries.to(device, dtype)

    def _reserve(self, entries: int) -> None:
        rows, slots, width = self.entries.shape
        if entries > slots:
            while slots < entries:
                slots *= 2
            with normal_tensors():
                roomy = self.entries.new_zeros(rows, slots, width)
            roomy[:, : self.entries.shape[1]] = self.entries
            self.entries = roomy

    def _forget(self, lengths: Lengths, until: int) -> None:
        """Zeroes the entries of tokens from each row's length up to `until`."""
        end = until // self.rate
        if lengths.uniform is not None:
            self.entries[:, lengths.uniform // self.rate : end] = 0
            return
        beyond = torch.arange(end) >= (lengths.tensor() // self.rate).unsqueeze(1)
        self.entries[:, :end].masked_fill_(beyond.to(self.entries.device).unsqueeze(2), 0)
