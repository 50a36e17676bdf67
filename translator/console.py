"""Where the command line reads and writes: files, pipes, terminals."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from translator.errors import UserError
from translator.streams import windows
from translator.textio import atomic_writer


def input_windows(text: list[str] | None, path: Path | None, most: int) -> Iterator[list[str]]:
    """Lines to work on, at most `most` at a time: `text` itself, the file `path`, or standard input.

    Raises `UserError` when the file can't be read.
    """
    if text:
        yield text
    elif path is None:
        yield from windows(sys.stdin.buffer, "stdin", most)
    else:
        try:
            stream = path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        with stream:
            yield from windows(stream, str(path), most)


@contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """`path`, replaced whole when the block ends well; without one, standard output, in UTF-8 whatever the locale."""
    if path is None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    with nullcontext(sys.stdout) if path is None else atomic_writer(path) as out:
        yield out


@contextmanager
def progress_bar(what: str, shown: bool = True) -> Iterator[Callable[[int, int | None], None] | None]:
    """`progress(done, total)` that moves a bar on a terminal's stderr, total None when unknown; None elsewhere."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description} {task.completed:,}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(table: Table, lines: list[str]) -> None:
    """A table, then lines for what it can't hold; plain and as wide as it needs when not on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    for line in lines:
        console.print(line, markup=False)
