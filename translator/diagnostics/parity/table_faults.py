"""Faults of a container whose rows are entries of a table: K and V stay, so that it is the table that can go wrong."""

from torch import Tensor

from translator.cache import IndirectCache, Lengths, Step, View
from translator.cache.indirect import Ancestry
from translator.diagnostics.parity.faults import FaultList, Original

FAULTS = FaultList(by_reference=True, container=IndirectCache)


@FAULTS.add("table not reordered", Ancestry, "select")
def _(original: Original, self: Ancestry, rows: Tensor, length: int, turn: int) -> None:
    """Rows go on from themselves, whichever parent was chosen."""
    before, leaving = self.origin.clone(), len(rows) != self.rows
    original(self, rows, length, turn)
    if not leaving:
        self.origin = before


@FAULTS.add("table reordered once a layer", Ancestry, "select", layers=2)
def _(original: Original, self: Ancestry, rows: Tensor, length: int, turn: int) -> None:
    """The layers share a table, and each makes the change."""
    if len(rows) == self.rows:
        self.turn = min(self.turn, turn - 1)
    original(self, rows, length, turn)


@FAULTS.add("homes stay when sentences leave", Ancestry, "select")
def _(original: Original, self: Ancestry, rows: Tensor, length: int, turn: int) -> None:
    """A sentence writes where one that is still there has its tokens."""
    before = self.home.clone()
    original(self, rows, length, turn)
    self.home = before[: len(rows)]


@FAULTS.add("table not followed", IndirectCache, "_gathered")
def _(original: Original, self: IndirectCache, lengths: Lengths, visible: int) -> tuple[Tensor, Tensor]:
    """Every row reads what it wrote itself."""
    table = self.table
    followed, table.origin = table.origin, table.home.unsqueeze(1).expand(-1, visible)
    try:
        return original(self, lengths, visible)
    finally:
        table.origin = followed


@FAULTS.add("slots beyond a row's length shown", IndirectCache, "_gathered")
def _(original: Original, self: IndirectCache, lengths: Lengths, visible: int) -> tuple[Tensor, Tensor]:
    """What was taken back or never written is masked alone; a NaN among it gets through the mask."""
    return original(self, Lengths(lengths.rows, visible), visible)


@FAULTS.add("rows of unequal length not parted", Ancestry, "may_clash")
def _(original: Original, self: Ancestry, lengths: Lengths) -> bool:
    """A shorter row writes over what a longer one of its sentence still reads."""
    return False


@FAULTS.add("written beside its home", IndirectCache, "append")
def _(original: Original, self: IndirectCache, k: Tensor, v: Tensor, step: Step, view: View) -> None:
    """Row r writes to buffer row r, also after sentences left or changed places."""
    home = self.table.home
    self.table.home = home.sort().values
    try:
        original(self, k, v, step, view)
    finally:
        self.table.home = home


@FAULTS.add("table expanded as a block", Ancestry, "expand")
def _(original: Original, self: Ancestry, beams: int, turn: int) -> None:
    """Row r becomes row r of each copy of the batch, not a neighbour of its copies."""
    before = self.rows
    original(self, beams, turn)
    if self.rows != before:
        self.origin = self.origin[::beams].repeat(beams, 1)


@FAULTS.add("new beams keep one home", Ancestry, "expand")
def _(original: Original, self: Ancestry, beams: int, turn: int) -> None:
    """The rows of an expanded sentence all write to the same buffer row."""
    before = self.rows
    original(self, beams, turn)
    if self.rows != before:
        self.home = self.home[::beams].repeat_interleave(beams)


@FAULTS.add("growth empties the table", Ancestry, "widen")
def _(original: Original, self: Ancestry, slots: int) -> None:
    """When there is room for more slots, the old ones are looked for in the first row."""
    before = self.origin
    original(self, slots)
    if self.origin is not before:
        self.origin.zero_()


@FAULTS.add("admit leaves the table as it was", IndirectCache, "write")
def _(original: Original, self: IndirectCache, rows: slice, contents: dict[str, Tensor], length: int) -> None:
    """The newcomer's beams are looked for where the leaver's were."""
    before = self.table.origin.clone()
    original(self, rows, contents, length)
    self.table.origin[:, : before.shape[1]] = before
