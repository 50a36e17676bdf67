"""What a run tells: lines for people, a progress bar on a terminal, every figure in a JSONL log."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.board import Board
from translator.errors import UserError
from translator.textio import atomic_write_bytes

LOG = "log.jsonl"
_LONGEST_RECORD = 1 << 24  # bytes
# Seconds until the first estimate, and between signs of life where there is no bar.
FIRST_LINE, NEXT_LINE = 3.0, 60.0


class _Stderr(Console):
    """Standard error that may go away: a run whose terminal is closed still has to be saved."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True


class Report:
    """Prints to stderr and appends to `run/log.jsonl`."""

    def __init__(self, run: Path) -> None:
        self.path = run / LOG
        self.board: Board | None = None
        self.console = _Stderr()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("training", total=None)
        self._next_line = time.monotonic() + FIRST_LINE

    def expect(self, total: int) -> None:
        """Says how many steps the run has."""
        self.progress.update(self.task, total=total)

    def __enter__(self) -> "Report":
        self._next_line = time.monotonic() + FIRST_LINE
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None
        try:
            self.progress.stop()
        except OSError:
            self.console.quiet = True

    def say(self, line: str) -> None:
        """One line for people."""
        self.console.print(line, markup=False)

    def record(self, event: str, step: int, line: str | None = None, **values: Any) -> None:
        """One record into the log, and `line` for people.

        Raises `UserError` when the log can't be written, `ValueError` for a number that JSON doesn't have.
        """
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"event": event, "step": step, "time": now, **values}, ensure_ascii=False, allow_nan=False)
        try:
            with self.path.open("ab") as log:
                log.write(text.encode("utf-8", errors="backslashreplace") + b"\n")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        if self.board is not None:
            self.board.record(event, step, values)
        if line is not None:
            self.say(line)

    def advance(self, step: int, description: str, line: str) -> None:
        """Moves the bar; says `line` after the first seconds and, where there is no bar, every minute of silence."""
        self.progress.update(self.task, completed=step, description=description)
        if time.monotonic() >= self._next_line:
            self.say(line)
            self.heard()

    def heard(self) -> None:
        """Something was just said about the training: the next sign of life can wait."""
        self._next_line = time.monotonic() + NEXT_LINE if self.progress.disable else float("inf")

    def resume(self, step: int) -> None:
        """Drops records of steps after `step`, and test scores: they were lost with the process and come again.

        Raises `UserError` that names the line for a log that isn't this program's.
        """
        self.progress.update(self.task, completed=step)
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise UserError(f"{self.path}: is not a file; move it away")
        kept = []
        for raw, record in _records(self.path):
            lost = record["event"] == "test" or record["step"] > step
            kept.append(b"" if lost else raw)
        atomic_write_bytes(self.path, b"".join(kept))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a run's log; raises `UserError` that names the line for a log that isn't this program's."""
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a log, and what it says; a last one that was cut off, by a kill or a full disk, is left out."""
    try:
        with path.open("rb") as log:
            number = 0
            while raw := log.readline(_LONGEST_RECORD):
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_RECORD:
                    break
                number += 1
                record = _record(raw)
                if record is None:
                    raise UserError(f"{path}: line {number} is not a record of this program; move the file away")
                yield raw, record
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    good = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("event"), str)
    return record if good else None


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`: two figures' worth, and never `0 min` for what isn't over."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"
