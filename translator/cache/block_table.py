"""Which blocks each row holds: one table for the layers of a stack."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from translator.cache.lengths import Lengths
from translator.cache.pool import BlockPool, LayerKey
from translator.cache.step import Step


class BlockCount(NamedTuple):
    """Blocks that a cache holds, each once, and how many it would if every row had copies of its own."""

    held: int
    copied: int


class BlockTable:
    """The blocks of each row, one table for the layers of a stack; what `Ancestry` is to rows of one buffer.

    Between steps a row holds the blocks that its tokens lie in and no more. Each layer's state counts the changes it
    was told of (`turn`), and the first to hear of one makes it.
    """

    def __init__(self, pool: BlockPool, rows: int) -> None:
        self.pool = pool
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.keys: list[LayerKey] = []
        self.turn = 0
        self._begun: weakref.ref[Step] | None = None
        self._after = Lengths(rows)
        self._flat: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor | None] = {}
        weakref.finalize(self, _give_back, pool, self.rows).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of the table, eight for each block of a row."""
        return 8 * sum(map(len, self.rows))

    @property
    def count(self) -> BlockCount:
        """What the rows hold, counted both ways."""
        return BlockCount(len(set(itertools.chain(*self.rows))), sum(map(len, self.rows)))

    def begin(self, step: Step) -> None:
        """Gives every row blocks of its own for the step's tokens; the unfinished one is copied where others hold it.

        Raises `CacheFullError` before anything has changed.
        """
        if self._begun is not None and self._begun() is step:
            return
        page, lengths = self.pool.page, step.lengths.tensor().tolist()
        spans = [(length // page, (length + step.T - 1) // page + 1) for length in lengths]
        written = Counter(
            block
            for row, (first, end) in zip(self.rows, spans, strict=True)
            for block in row[first:end]
            if self.pool.is_shared(block)
        )
        fresh = sum(max(end - len(row), 0) for row, (_, end) in zip(self.rows, spans, strict=True))
        # The last of those who write to a block may keep it, once the others have theirs.
        parted = sum(min(count, self.pool.references[block] - 1) for block, count in written.items())
        self.pool.require(fresh + parted)
        copies = []
        for row, length, (first, end) in zip(self.rows, lengths, spans, strict=True):
            for place in range(first, min(end, len(row)) if written else first):
                if self.pool.is_shared(row[place]):
                    own = self.pool.take()
                    if place == first and length % page:
                        copies.append((row[place], own))
                    self.pool.release([row[place]])
                    row[place] = own
            row += (self.pool.take() for _ in range(len(row), end))
        self.pool.copy(copies)
        self._begun, self._after = weakref.ref(step), step.lengths.advanced(step.T)
        self._hidden = {}
        if fresh or parted:
            self._flat = {}

    def flat(self, visible: int, device: torch.device) -> Tensor:
        """Where the first `visible` slots of every row lie, `(rows, visible)`, int64, in the pool's slots.

        A slot in no block lies in the first one, which is another's: see `hidden`.
        """
        if visible not in self._flat:
            width = self.pool.blocks_for(visible)
            table = torch.tensor(
                [row[:width] + [0] * (width - len(row)) for row in self.rows], dtype=torch.int64, device=device
            ).view(len(self.rows), width, 1)
            slots = table * self.pool.page + torch.arange(self.pool.page, device=device)
            self._flat = {visible: slots.view(len(self.rows), width * self.pool.page)[:, :visible]}
        return self._flat[visible]

    def hidden(self, visible: int, device: torch.device) -> Tensor | None:
        """Which slots of a view are beyond their row's length, `(rows, visible, 1, 1)`; None where none is."""
        if visible not in self._hidden:
            beyond = None
            if self._after.uniform is None or self._after.uniform < visible:
                slots = torch.arange(visible, device=device)
                beyond = (slots >= self._after.tensor().to(device).unsqueeze(1))[..., None, None]
            self._hidden[visible] = beyond
        return self._hidden[visible]

    def forget_places(self) -> None:
        """Works out anew where slots lie: blocks have changed."""
        self._begun, self._flat, self._hidden = None, {}, {}

    # -- each of these is made once, by the first layer that is told ---------------------------------------------------

    def expand(self, beams: int, turn: int) -> None:
        """Every row becomes `beams` rows, neighbours first, that hold the same blocks."""
        if self._is_new(turn):
            self._become([row for row in self.rows for _ in range(beams)])

    def select(self, rows: Tensor, turn: int) -> None:
        """Row i holds what the old row `rows[i]` held."""
        if self._is_new(turn):
            self._become([self.rows[row] for row in rows.tolist()])

    def adopt(self, rows: slice, blocks: Sequence[list[int]], turn: int) -> None:
        """These rows hold `blocks`, each entry for as many neighbours as it takes."""
        if self._is_new(turn):
            self._replace(rows, blocks)

    def renew(self, rows: slice, different: int, blocks: int, turn: int) -> None:
        """These rows give back what they hold and get `blocks` new blocks; neighbours share them, so that there are
        `different` rows. Raises `CacheFullError` before anything has changed."""
        if turn <= self.turn:
            return
        self.pool.require(different * blocks - self.pool.freed_by(self.rows[rows]))
        self.turn = turn
        self._replace(rows, [[]])
        new = [[self.pool.take() for _ in range(blocks)] for _ in range(different)]
        self._replace(rows, new)
        self.pool.release(itertools.chain(*new))  # taking them held them once; the rows do now

    def clear(self, lengths: Lengths) -> None:
        """Gives back the blocks beyond each row's length."""
        for row, length in zip(self.rows, lengths.tensor().tolist(), strict=True):
            kept = self.pool.blocks_for(length)
            if len(row) > kept:
                self.pool.release(row[kept:])
                del row[kept:]
                self.forget_places()

    def _is_new(self, turn: int) -> bool:
        if turn <= self.turn:
            return False
        self.turn = turn
        return True

    def _replace(self, rows: slice, blocks: Sequence[list[int]]) -> None:
        repeats = (rows.stop - rows.start) // max(len(blocks), 1)
        theirs = [row for row in blocks for _ in range(repeats)]
        self._become([*self.rows[: rows.start], *theirs, *self.rows[rows.stop :]])

    def _become(self, rows: Sequence[list[int]]) -> None:
        new = [list(row) for row in rows]
        self.pool.hold(itertools.chain(*new))
        self.pool.release(itertools.chain(*self.rows))
        self.rows[:] = new  # in place: it is what a table that goes gives back
        self.forget_places()


def _give_back(pool: BlockPool, rows: list[list[int]]) -> None:
    pool.release(itertools.chain(*rows))
