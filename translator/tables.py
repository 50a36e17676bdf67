"""Tables that lose nothing, however narrow the place: headings wrap, then words, then rows become columns."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2
_LONG_WORD = 16


@dataclass(frozen=True, slots=True)
class _Column:
    """One column as texts; `figures` are never broken, other cells between words."""

    heading: str
    cells: list[str]
    figures: bool

    @property
    def natural(self) -> int:
        """The width that nothing wraps in."""
        return max(map(cell_len, (self.heading, *self.cells)), default=0)

    @property
    def least(self) -> int:
        """The width that no figure is broken in, and no word but a very long one."""
        if self.figures:
            return max(map(cell_len, [*self.heading.split(), *self.cells]), default=0)
        words = [word for text in (self.heading, *self.cells) for word in text.split()]
        return min(_LONG_WORD, max(map(cell_len, words), default=0))


def natural_width(table: Table) -> int:
    """The characters a line of `table` takes when nothing wraps; its title not counted."""
    columns = _columns(table)
    return sum(column.natural for column in columns) + _GAP * (len(columns) - 1)


def fitted(table: Table, width: int) -> Table | list[str]:
    """`table`, its cells text, in at most `width` characters a line, or lines for a place too narrow for any table.

    Right-aligned columns hold figures, which stay whole.
    """
    columns = _columns(table)
    for form in (columns, _transposed(columns)):
        widths = _widths(form, width)
        if widths is not None:
            return _table(form, widths)
    return _records(columns)


def _columns(table: Table) -> list[_Column]:
    return [
        _Column(str(column.header), [str(cell) for cell in column.cells], column.justify == "right")
        for column in table.columns
    ]


def _transposed(columns: Sequence[_Column]) -> list[_Column]:
    """Rows as columns: the first column's cells become headings."""
    first, *others = columns
    rows = [
        _Column(name, [column.cells[row] for column in others], figures=True) for row, name in enumerate(first.cells)
    ]
    return [_Column(first.heading, [column.heading for column in others], figures=False), *rows]


def _widths(columns: Sequence[_Column], width: int) -> list[int] | None:
    """A width for each column, `width` with the gaps or less; None where their least widths don't fit."""
    widths = [column.least for column in columns]
    spare = width - sum(widths) - _GAP * (len(columns) - 1)
    if spare < 0:
        return None
    # The narrowest wish first, so that as few columns as possible wrap.
    for index in sorted(range(len(columns)), key=lambda i: columns[i].natural - columns[i].least):
        more = min(spare, columns[index].natural - columns[index].least)
        widths[index] += more
        spare -= more
    return widths


def _table(columns: Sequence[_Column], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.heading), justify="right" if column.figures else "left", width=width, overflow="fold"
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _records(columns: Sequence[_Column]) -> list[str]:
    """A row's first cell, then a line for each other cell under it."""
    first, *others = columns
    lines = []
    for row, name in enumerate(first.cells):
        lines += [f"{first.heading}: {name}", *(f"  {column.heading}: {column.cells[row]}" for column in others)]
    return lines
