"""Runs the systems in turn, A B C A B C …, each in a process of its own, and keeps what each run took."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SETTLE = 0.25  # seconds in which the threads of the system before stop to wait for work and sleep
PATIENCE = 300.0  # seconds for one job, compilation included

Runs = dict[str, list[dict[str, Any]]]
"""Each system's runs, one a round."""


class Left(Exception):
    """A system gives no more answers; the message says why."""


class Process:
    """A worker process; see `decoding.worker`."""

    def __init__(self, name: str, folders: dict[str, dict[str, str]], threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        arguments = json.dumps({"folders": folders, "threads": threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "decoding.worker", name, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, **job: Any) -> dict[str, Any]:
        """The answer to one job; raises `Left` when there is none."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            answer = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            self._process.kill()
            raise Left(f"took longer than {PATIENCE:.0f} s") from None
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Left(f"its process ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        if "missing" in found:
            raise Left(found["missing"])
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Bench:
    """The systems `names`, on `threads` threads, with `folders` of each model; `say` is told what happens."""

    def __init__(
        self,
        names: Sequence[str],
        folders: dict[str, dict[str, str]],
        threads: int,
        rounds: int,
        say: Callable[[str], None],
    ) -> None:
        self.names, self.folders, self.threads, self.rounds, self.say = list(names), folders, threads, rounds, say
        self.left: dict[str, str] = {}
        self.layouts: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
        self._processes: dict[str, Process] = {}

    def ask(self, name: str, **job: Any) -> dict[str, Any] | None:
        """One system's answer; None where it can't, which is said once."""
        if name not in self._processes:
            self._processes[name] = Process(name, self.folders, self.threads)
        try:
            return self._processes[name].ask(**job)
        except Left as why:
            self.leave(name, f"{job['job']}: {why}")
            return None

    def leave(self, name: str, why: str) -> None:
        """Notes what is left out."""
        if self.left.get(name) != why:
            self.left[name] = why
            self.say(f"left out: {name}: {why}")

    def fresh(self, name: str, **job: Any) -> dict[str, Any] | None:
        """One system's answer from a new process, which ends with it."""
        process = Process(name, self.folders, self.threads)
        try:
            return process.ask(**job)
        except Left as why:
            self.leave(name, f"{job['job']}: {why}")
            return None
        finally:
            process.close()

    def interleaved(
        self,
        jobs: dict[str, dict[str, Any]],
        rounds: int | None = None,
        once: Iterable[str] = (),
        warm: bool = True,
        more: Callable[[str, int], dict[str, Any]] = lambda name, number: {},
    ) -> Runs:
        """Runs of each system's job, in turn, in so many rounds, by default the bench's; those in `once` in one.

        `warm`: each runs once before, which isn't kept. `more(name, round)` adds to the job.
        """
        runs: Runs = {name: [] for name in jobs}
        for number in range(-1 if warm else 0, rounds or self.rounds):
            for name, job in jobs.items():
                if name not in runs or (name in once and number > 0):
                    continue
                answer = self.ask(name, **job, **more(name, number))
                time.sleep(SETTLE if self.threads > 1 else 0.02)
                if answer is None:
                    del runs[name]
                elif number >= 0:
                    runs[name].append(answer)
        return runs

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.close()
