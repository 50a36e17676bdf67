"""Lines from wherever they come, in windows: a file in full ones, a pipe in whatever has arrived."""

import itertools
import queue
import stat
import threading
from collections.abc import Iterator
from os import dup, fdopen, fstat
from typing import BinaryIO

from translator.textio import iter_lines

_END = object()


def windows(stream: BinaryIO, name: str, most: int) -> Iterator[list[str]]:
    """The lines of `stream`, at most `most` at a time and never an empty list.

    From a pipe or a terminal, of which nothing was read before, a window holds what has arrived: the first line doesn't
    wait for the last. Raises `UserError` as `iter_lines` does, after the lines before the bad one were given.
    """
    if _is_file(stream):
        yield from _full_windows(iter_lines(stream, name), most)
    else:
        yield from _arriving(iter_lines(_own(stream), name), most)


def _is_file(stream: BinaryIO) -> bool:
    try:
        return stat.S_ISREG(fstat(stream.fileno()).st_mode)
    except OSError:
        return True  # no descriptor: in memory, so nothing is to be waited for


def _own(stream: BinaryIO) -> BinaryIO:
    """The same pipe for the reading thread alone.

    When a program ends while its thread waits in `sys.stdin`, Python can't close that and aborts.
    """
    return fdopen(dup(stream.fileno()), "rb")


def _full_windows(lines: Iterator[str], most: int) -> Iterator[list[str]]:
    while window := list(itertools.islice(lines, most)):
        yield window


def _arriving(lines: Iterator[str], most: int) -> Iterator[list[str]]:
    waiting: queue.Queue[object] = queue.Queue(maxsize=most)

    def read() -> None:
        try:
            for line in lines:
                waiting.put(line)
            waiting.put(_END)
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        window, end = _take(waiting, most)
        if window:
            yield window
        if isinstance(end, Exception):
            raise end
        if end is _END:
            return


def _take(waiting: "queue.Queue[object]", most: int) -> tuple[list[str], object]:
    """Waits for one line, then takes what else is there; also what ended the lines, if they ended."""
    window: list[str] = []
    item = waiting.get()
    while isinstance(item, str):
        window.append(item)
        if len(window) == most:
            return window, None
        try:
            item = waiting.get_nowait()
        except queue.Empty:
            return window, None
    return window, item
