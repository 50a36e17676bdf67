"""One process a system: waits for a job, one line of JSON on standard input, answers with one line on standard output.

    python -m decoding.worker SYSTEM '{"folders": {…}, "threads": 1}'

Each system has its own threads, allocator and libraries this way, and nothing runs in it while another is timed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decoding.plain import plain_decoder, position_cost, read_bandwidth
from decoding.systems import SYSTEMS, Missing, System

Answer = dict[str, Any]


class Worker:
    """Jobs of one system; models are loaded on first use and stay."""

    def __init__(self, name: str, folders: dict[str, dict[str, str]], threads: int) -> None:
        self.name, self.folders, self.threads = name, folders, threads
        self._loaded: dict[str, System] = {}
        self._plain: dict[tuple[str, int], Callable[[], float]] = {}

    def system(self, model: str) -> Any:
        """The system with that model."""
        if model not in self._loaded:
            kind, options = SYSTEMS[self.name]
            self._loaded[model] = kind(self.folders[model], self.threads, **options)
        return self._loaded[model]

    def one(self, model: str, ids: list[int], beams: int, tokens: int) -> Answer:
        """One sentence, timed."""
        found, answer = timed(self.system(model).one(ids, beams, tokens))
        return {**answer, "tokens": found}

    def layouts(self, model: str) -> Answer:
        """The layouts to try."""
        return {"layouts": self.system(model).layouts()}

    def file(
        self,
        model: str,
        lines: list[str],
        beams: int,
        longest: int,
        layout: dict[str, Any] | None,
        every: int = 1,
    ) -> Answer:
        """A file of every so many-th line, timed, by default in the first layout."""
        system = self.system(model)
        (texts, tokens), answer = timed(system.file(lines, beams, longest, layout or system.layouts()[0]))
        return {**answer, "tokens": tokens, "texts": texts, "every": every}

    def plain(self, kind: str, tokens: int) -> Answer:
        """A decoder without a model, timed."""
        if (kind, tokens) not in self._plain:
            self._plain[kind, tokens] = plain_decoder(kind, tokens, self.threads)
        output, answer = timed(self._plain[kind, tokens])
        return {**answer, "output": output}

    def positions(self, model: str, near: int, far: int, steps: int) -> Answer:
        """The cost of a token by its position."""
        return position_cost(self.system(model), near, far, steps)

    def bandwidth(self) -> Answer:
        """Bytes a second."""
        return {"bandwidth": read_bandwidth(self.threads)}

    def memory(self, task: dict[str, Any]) -> Answer:
        """Peak megabytes of loading the model and doing a job, beyond what the imported libraries take."""
        SYSTEMS[self.name][0].libraries()
        gc.collect()
        before = status_megabytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        getattr(self, task.pop("job"))(**task)
        return {"megabytes": status_megabytes("VmHWM") - before}


def timed(call: Callable[[], Any]) -> tuple[Any, Answer]:
    """What `call` gives, and its wall and CPU seconds, those of all threads and finished children."""
    gc.collect()
    cpu, began = cpu_seconds(), time.perf_counter()
    result = call()
    wall = time.perf_counter() - began
    return result, {"wall": wall, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    """Of this process and its children, user and system."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def status_megabytes(field: str) -> float:
    """A field of this process's status, in megabytes (2²⁰ bytes)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise Missing(f"no {field} on this system")


def main() -> None:
    """Answers jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer
    worker = Worker(sys.argv[1], **json.loads(sys.argv[2]))
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(worker, job.pop("job"))(**job)
        except Missing as error:
            answer = {"missing": str(error)}
        except Exception as error:  # the other systems go on, and the report says what happened to this one
            answer = {"missing": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
