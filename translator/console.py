"""Where the command line reads and writes: files, pipes, terminals.

One rule everywhere: `-` is standard input where something is read, and standard output where something is written.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from translator.errors import UserError
from translator.streams import Windows, windows
from translator.textio import atomic_write_bytes, atomic_writer, check_writable, iter_lines, read_lines

if TYPE_CHECKING:
    from rich.table import Table

PROGRESS_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""


class Advance(Protocol):
    """Called with how much is done, how much there is in all (None when unknown), and what else there is to say."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


def is_standard_stream(path: Path | None) -> bool:
    """Whether `path` is `-`; a file of that name needs its whole path, for a `Path` knows no `./-`."""
    return str(path) == "-"


def one_standard_input(**paths: Path | None) -> None:
    """Raises `UserError` when more than one of these options is `-`: there is only one standard input."""
    _one_stream("read from standard input", paths)


def check_outputs(**paths: Path | None) -> None:
    """Finds out before any work whether these options' files can be written; raises `UserError` if not."""
    _one_stream("go to standard output", paths)
    for path in paths.values():
        if path is not None and not is_standard_stream(path):
            check_writable(path)


def _one_stream(what: str, paths: dict[str, Path | None]) -> None:
    options = [f"--{name}" for name, path in paths.items() if is_standard_stream(path)]
    if len(options) > 1:
        raise UserError(f"{' and '.join(options)}: only one of them can {what}")


def stream_name(path: Path) -> str:
    """What messages call the input `path`."""
    return "stdin" if is_standard_stream(path) else str(path)


def input_lines(path: Path) -> list[str]:
    """All lines of a file, or of standard input; raises `UserError` as `textio.read_lines` does."""
    return list(iter_lines(sys.stdin.buffer, "stdin")) if is_standard_stream(path) else read_lines(path)


@contextmanager
def input_windows(text: list[str] | None, path: Path | None, most: int) -> Iterator[Windows]:
    """Lines to work on, at most `most` at a time: `text` itself, the file `path`, or standard input.

    Raises `UserError` when the file can't be read.
    """
    if text and text != ["-"]:
        yield Windows(iter([text]))
    elif path is None or is_standard_stream(path):
        yield windows(sys.stdin.buffer, "stdin", most)
    else:
        try:
            stream = path.open("rb")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
        with stream:
            yield windows(stream, str(path), most)


@contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """`path`, replaced whole when the block ends well; without one, standard output, in UTF-8 whatever the locale."""
    if path is not None and not is_standard_stream(path):
        with atomic_writer(path) as out:
            yield out
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    with nullcontext(sys.stdout) as out:
        yield out


def write_bytes(path: Path, data: bytes) -> None:
    """`data` as the whole of the file `path`, or to standard output; raises `UserError` when it can't be written."""
    if not is_standard_stream(path):
        atomic_write_bytes(path, data)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextmanager
def progress_bar(what: str, shown: bool = True) -> Iterator[Advance]:
    """`advance(done, total)`, which moves a bar on a terminal's stderr, or elsewhere writes a line now and then."""
    if not shown:
        yield lambda done, total, note="": None
        return
    from rich.console import Console  # here, for a sentence is translated before all of it is imported
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _progress_lines(what)
    else:
        columns = (TextColumn("{task.description} {task.fields[count]}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None, count="")
            yield lambda done, total, note="": bar.update(
                task, completed=done, total=total, count=_count(done, total, note)
            )


def _progress_lines(what: str) -> Advance:
    start = last = time.monotonic()

    def advance(done: int, total: int | None, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_EVERY:
            last = now
            print(
                f"translator: {what}: {_count(done, total, note)} after {now - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return advance


def _count(done: int, total: int | None, note: str) -> str:
    count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    return f"{count}, {note}" if note else count


def show(table: "Table", notes: list[str], *, aside: bool = False) -> None:
    """A table, its title before it, then notes for what it can't hold; on stderr if `aside`.

    As wide as it needs when not on a terminal; on a narrow one in a narrower form, never with figures left out.
    """
    from rich.console import Console
    from rich.table import Table

    from translator.tables import fitted, natural_width

    console = Console(highlight=False, stderr=aside)
    if not console.is_terminal:
        console.width = max(80, natural_width(table))
    found = fitted(table, console.width)
    for line in str(table.title).split("\n") if table.title else ():
        console.print(line, markup=False, soft_wrap=True)
    if isinstance(found, Table):
        console.print(found)
    for line in [*(found if isinstance(found, list) else ()), *notes]:
        console.print(line, markup=False, soft_wrap=True)
