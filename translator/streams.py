"""Lines from wherever they come, in windows: a file in full ones, a pipe in whatever has arrived."""

import stat
import threading
from collections.abc import Callable, Iterator
from os import dup, fdopen, fstat
from typing import BinaryIO

from translator.errors import UserError
from translator.textio import iter_lines

MOST_CHARACTERS = 1 << 20  # a window ends with the line that reaches it, so that long lines don't fill the memory


class Windows(Iterator[list[str]]):
    """Windows of lines; `ready()` says whether the next one, or their end, can be had without waiting."""

    def __init__(self, windows: Iterator[list[str]], ready: Callable[[], bool] = lambda: True) -> None:
        self._windows = windows
        self.ready = ready

    def __next__(self) -> list[str]:
        return next(self._windows)


def windows(stream: BinaryIO, name: str, most: int) -> Windows:
    """The lines of `stream`, at most `most` or about `MOST_CHARACTERS` at a time and never an empty list.

    From a pipe or a terminal, of which nothing was read before, a window holds what has arrived: the first line doesn't
    wait for the last. Raises `UserError` as `iter_lines` does, after the lines before the bad one were given.
    """
    if _is_file(stream):
        return Windows(_full_windows(iter_lines(stream, name), most))
    return _arriving(iter_lines(_own(stream), name), most)


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
    window: list[str] = []
    characters = 0
    try:
        for line in lines:
            window.append(line)
            characters += len(line)
            if len(window) >= most or characters >= MOST_CHARACTERS:
                yield window
                window, characters = [], 0
    except UserError:
        if window:
            yield window
        raise
    if window:
        yield window


def _arriving(lines: Iterator[str], most: int) -> Windows:
    waiting = _Waiting(most)

    def read() -> None:
        try:
            for line in lines:
                waiting.put(line)
            waiting.end(None)
        except Exception as error:
            waiting.end(error)

    def arrived() -> Iterator[list[str]]:
        while window := waiting.take():
            yield window
        if waiting.error is not None:
            raise waiting.error

    threading.Thread(target=read, daemon=True).start()
    return Windows(arrived(), waiting.ready)


class _Waiting:
    """Lines on their way from the reading thread: at most `most`, or about `MOST_CHARACTERS`."""

    def __init__(self, most: int) -> None:
        self.error: Exception | None = None
        self._most = most
        self._lines: list[str] = []
        self._characters = 0
        self._ended = False
        self._changed = threading.Condition()

    def put(self, line: str) -> None:
        """Adds a line, as soon as there is room."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) < self._most and self._characters < MOST_CHARACTERS)
            self._lines.append(line)
            self._characters += len(line)
            self._changed.notify_all()

    def end(self, error: Exception | None) -> None:
        """No line comes any more, because of `error` if there is one."""
        with self._changed:
            self.error, self._ended = error, True
            self._changed.notify_all()

    def ready(self) -> bool:
        """Whether `take` has something to give, or nothing comes any more."""
        with self._changed:
            return bool(self._lines) or self._ended

    def take(self) -> list[str]:
        """All lines that are there; waits for the first, and gives none only after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            window, self._lines, self._characters = self._lines, [], 0
            self._changed.notify_all()
            return window
