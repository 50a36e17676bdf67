"""Faults of a container in blocks: who holds which, who may write to one, and where a row's slots lie."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from translator.cache import BlockPool, PagedCache
from translator.cache.block_table import BlockTable
from translator.diagnostics.parity.faults import FaultList, Original

FAULTS = FaultList(by_reference=True, container=PagedCache)


@FAULTS.add("block table not reordered", BlockTable, "select")
def _(original: Original, self: BlockTable, rows: Tensor, turn: int) -> None:
    """Rows go on from themselves, whichever parent was chosen."""
    original(self, rows if len(rows) != len(self.rows) else torch.arange(len(rows)), turn)


@FAULTS.add("block table reordered once a layer", BlockTable, "select", layers=2)
def _(original: Original, self: BlockTable, rows: Tensor, turn: int) -> None:
    """The layers share a table, and each makes the change."""
    if len(rows) == len(self.rows):
        self.turn = min(self.turn, turn - 1)
    original(self, rows, turn)


@FAULTS.add("blocks written that others hold", BlockPool, "is_shared")
def _(original: Original, self: BlockPool, block: int) -> bool:
    """A row goes on in the unfinished block of its neighbours."""
    return False


@FAULTS.add("unfinished block not copied", BlockPool, "copy")
def _(original: Original, self: BlockPool, pairs: Sequence[tuple[int, int]]) -> None:
    """A row that parts from its neighbours starts its own block with whatever was there."""
    for layer in self.layers.values():
        for part in layer:
            part[[target for _, target in pairs]] = 0


@FAULTS.add("blocks lent while others hold them", BlockPool, "release")
def _(original: Original, self: BlockPool, blocks: Iterable[int]) -> None:
    """The first who gives a block back frees it for everyone."""
    for block in blocks:
        if self.references[block]:
            self.references[block] = 1
            original(self, [block])


@FAULTS.add("block table not followed", BlockTable, "flat")
def _(original: Original, self: BlockTable, visible: int, device: torch.device) -> Tensor:
    """Every row reads and writes where the first of its neighbours does."""
    places = original(self, visible, device)
    return places[torch.arange(len(places), device=device) // 2 * 2]


@FAULTS.add("slots beyond a row's length read", BlockTable, "hidden")
def _(original: Original, self: BlockTable, visible: int, device: torch.device) -> Tensor | None:
    """What was taken back or never written is masked alone; a NaN among it gets through the mask."""
    return None


@FAULTS.add("block table expanded as a block", BlockTable, "expand")
def _(original: Original, self: BlockTable, beams: int, turn: int) -> None:
    """Row r becomes row r of each copy of the batch, not a neighbour of its copies."""
    if turn > self.turn:
        before = list(self.rows)
        original(self, beams, turn)
        self._become(before * beams)


@FAULTS.add("growth empties the blocks", BlockPool, "_add")
def _(original: Original, self: BlockPool, blocks: int) -> None:
    """When there are more blocks, the old ones hold nothing."""
    original(self, blocks)
    for layer in self.layers.values():
        for part in layer:
            part.zero_()
