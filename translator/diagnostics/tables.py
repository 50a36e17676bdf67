"""Tables of reports as plain text."""

import io

from rich.console import Console
from rich.table import Table


def as_text(table: Table, width: int = 160) -> str:
    """A table as plain text, whatever the terminal."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().split("\n")).rstrip()
