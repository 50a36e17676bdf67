"""What a run tells: lines for people, a progress bar on a terminal, every figure in a JSONL log."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG = "log.jsonl"


class Report:
    """Prints to stderr and appends to `run/log.jsonl`."""

    def __init__(self, run: Path, total: int) -> None:
        self.path = run / LOG
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("training", total=total)

    def __enter__(self) -> "Report":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """One line for people."""
        self.console.print(line, markup=False)

    def resume(self, step: int) -> None:
        """Drops figures of steps after `step`: they were lost with the process and come again."""
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            self.path.write_text("".join(line for line in lines if _step(line) <= step), encoding="utf-8")
        self.progress.update(self.task, completed=step)

    def figures(self, step: int, line: str, **values: Any) -> None:
        """Figures of one step: into the log, and as `line` for people."""
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": step, **values}, ensure_ascii=False) + "\n")
        self.say(line)

    def advance(self, step: int, description: str) -> None:
        """Moves the bar."""
        self.progress.update(self.task, completed=step, description=description)


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
