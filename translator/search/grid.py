"""What a search keeps of the sentences it is decoding: a grid of B sentences by K rows, on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.search.base import NEVER, Hypothesis, Sentence

Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class Member:
    """A sentence in the grid, under the number its caller knows it by.

    `trail` has for each step what its rows took: tokens `(K,)`, and parents `(K,)`, the rows they went on from (None:
    each from itself). What a row holds is read back from there, so that a step moves no tokens.
    """

    number: int
    sentence: Sentence
    config: DecodeConfig
    found: list[Hypothesis] = field(default_factory=list)
    gone: bool = False
    """Done or cancelled: leaves before the next step."""
    trail: list[tuple[list[int], list[int] | None]] = field(default_factory=list)
    limit: int = field(init=False)
    _rows: list[list[int]] = field(default_factory=list)
    _rows_at: int = 0

    def __post_init__(self) -> None:
        self.limit = self.sentence.limit

    @property
    def key(self) -> tuple[int, ...]:
        """What its samples are drawn by."""
        return (self.number,) if self.sentence.key is None else self.sentence.key

    def held(self, row: int) -> list[int]:
        """The tokens of one row, from first to last."""
        found = []
        for tokens, parents in reversed(self.trail):
            found.append(tokens[row])
            if parents is not None:
                row = parents[row]
        found.reverse()
        return found

    def all_held(self, rows: int) -> list[list[int]]:
        """The tokens of all rows, for whoever asks at each step: what was found the last time grows."""
        held = self._rows or [[] for _ in range(rows)]
        for tokens, parents in self.trail[self._rows_at :]:
            held = [[*held[parent], token] for parent, token in zip(parents or range(rows), tokens, strict=True)]
        self._rows, self._rows_at = held, len(self.trail)
        return held


class Grid:
    """Sentences have lengths of their own: each counts from its own first token.

    Lists of each sentence's rows: `totals`, log-probabilities in fp64, since a long target's rounding would show in its
    score; `live`, rows that go on; `tokens`, what the next step appends; `parents`, the rows these go on from, None
    where each goes on from itself.
    """

    def __init__(self, members: Sequence[Member], rows: int, *, alike: bool) -> None:
        """Nothing decoded yet. `alike`: rows that would all do the same, of which only the first may be continued."""
        self.rows = rows
        begun = 1 if alike else rows
        self.totals = [[0.0] * begun + [NEVER] * (rows - begun) for _ in members]
        self.live = [[True] * begun + [False] * (rows - begun) for _ in members]
        self.tokens = [[member.sentence.start_id] * rows for member in members]
        self.parents: list[list[int]] | None = None
        self._settle(list(members))

    def moves(self) -> Tensor | None:
        """`(B, K)`, the rows that rows go on from, where some go on from another."""
        parents = self.parents
        if parents is None or all(row == parent for mine in parents for row, parent in enumerate(mine)):
            return None
        return torch.tensor(parents)

    @property
    def lengths(self) -> Tensor:
        """`(B,)` tokens decoded."""
        return torch.tensor([len(member.trail) for member in self.members])

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` gives, kept under `name` until the members change: for what hangs on them alone."""
        if name not in self._kept:
            self._kept[name] = make()
        return cast(Made, self._kept[name])

    def changed(self, order: Sequence[int], newcomers: "Grid | None" = None) -> None:
        """Slot i becomes the old slot `order[i]`; numbers from B on are the sentences of `newcomers`."""
        stay = list(range(self.rows))
        grids = [self] if newcomers is None else [self, newcomers]
        if any(grid.parents is not None for grid in grids):
            parents = [mine for grid in grids for mine in grid.parents or [stay] * len(grid.members)]
            self.parents = [parents[slot] for slot in order]
        for name in ("totals", "live", "tokens"):
            rows = [mine for grid in grids for mine in getattr(grid, name)]
            setattr(self, name, [rows[slot] for slot in order])
        members = [member for grid in grids for member in grid.members]
        self._settle([members[slot] for slot in order])

    def _settle(self, members: list[Member]) -> None:
        """What hangs on the members alone."""
        self.members = members
        self.shape = (len(members), self.rows)
        self._kept: dict[str, object] = {}
