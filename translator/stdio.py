"""Standard streams and signals: whatever becomes of them ends in one line and the status that the README states."""

import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from translator.errors import UserError
from translator.textio import ReaderGone

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the program to end: raised wherever it is, so that what is half-written is put away."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `Stopped`; one that was ignored before, as under nohup, still is."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    caught = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Within the block `sys.stdin`, `stdout` and `stderr` are there; input or output that fails is a `UserError`.

    A stream that was closed when the program started fails when it is used. What standard error can't take is lost.
    Once standard output has failed, what is still written to it goes nowhere: nothing fails again at the program's end.
    """
    for number in range(3):
        # A file opened later would take the number, and get what is meant for the stream.
        with suppress(OSError):
            if not _is_open(number):
                os.open(os.devnull, os.O_RDWR)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_ClosedInput()))
    sys.stdout = _text(_StandardOutput(closed=sys.stdout is None), sys.stdout)
    sys.stderr = _text(_StandardError(2, "w", closefd=False), sys.stderr)
    try:
        yield
    finally:
        with suppress(UserError):  # the program has its status already
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _text(raw: io.FileIO, like: Any) -> io.TextIOWrapper:
    """A text stream around `raw`, set up as the one it stands in for, which may be None."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(like, "encoding", "utf-8"),
        errors=getattr(like, "errors", "backslashreplace"),
        line_buffering=getattr(like, "line_buffering", False),
        write_through=getattr(like, "write_through", False),
    )


class _ClosedInput(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        raise UserError("standard input is closed; give text, a file or a pipe")


class _StandardOutput(io.FileIO):
    """File descriptor 1, whose write errors are mistakes that a user can mend."""

    def __init__(self, closed: bool) -> None:
        super().__init__(1, "w", closefd=False)
        self.failed = False
        self._was_closed = closed

    def write(self, data: Any, /) -> int:
        if self.failed:
            return memoryview(data).nbytes
        try:
            if self._was_closed:
                raise UserError("standard output is closed; open it, or name a file with --output")
            while (written := super().write(data)) is None:  # a pipe that its reader has made non-blocking is full
                select.select([], [1], [])
        except BaseException as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGone("standard output: its reader has gone") from None
            if isinstance(error, OSError):
                raise UserError(f"standard output: cannot be written: {error.strerror}") from None
            raise
        return written


class _StandardError(io.FileIO):
    """File descriptor 2; what can't be told goes nowhere."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or memoryview(data).nbytes
        return memoryview(data).nbytes
