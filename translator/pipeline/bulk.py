"""Windows of lines through the workers and out again in order, equal sentences once, memory bounded."""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Event

from translator.config import DecodeConfig
from translator.pipeline.decoding import TaskDecoder
from translator.pipeline.text import Piece, Task
from translator.pipeline.workers import Workers

AHEAD = 2
"""Windows that are under way while one is waited for: no worker waits for what is being read, cut or written."""

MOST_REMEMBERED = 32 << 20
"""Bytes, estimated, of what is kept for sentences that come again."""

REPEATABLE = ("greedy", "beam")
"""Searches that find the same for the same source whatever its place. A sample is drawn by its line."""


@dataclasses.dataclass(slots=True)
class Totals:
    """How far a run is: whole lines, sentences met, those searched for (not repeated ones), their target tokens."""

    lines: int = 0
    sentences: int = 0
    searched: int = 0
    tokens: int = 0


Report = Callable[[Totals], None]
"""Called after each batch with the run's totals so far."""


@dataclasses.dataclass(slots=True)
class _Window:
    by_line: list[list[Piece]]
    batches: list[Future[list[Task]]]
    waiting: dict[Task, list[int]]  # the lines that wait for a task
    left: list[int]  # tasks that each line waits for


class Bulk:
    """One run over any number of windows, each the pieces of its lines."""

    def __init__(self, decoder: TaskDecoder, config: DecodeConfig, report: Report | None = None) -> None:
        self.totals = Totals()
        self._decoder, self._config, self._report = decoder, config, report
        self._known = _Known(config.n_best) if config.search_name in REPEATABLE else None

    def run(
        self, windows: Iterable[list[list[Piece]]], workers: Workers, ready: Callable[[], bool]
    ) -> Iterator[list[list[Piece]]]:
        """Each window once everything in it is found; if the next isn't `ready`, that comes before waiting for it."""
        under_way: deque[_Window] = deque()
        for by_line in windows:
            under_way.append(self._begun(by_line, workers))
            while under_way and (len(under_way) > AHEAD or not ready()):
                yield self._finished(under_way.popleft(), workers)
        while under_way:
            yield self._finished(under_way.popleft(), workers)

    def _begun(self, by_line: list[list[Piece]], workers: Workers) -> _Window:
        waiting: dict[Task, list[int]] = {}
        left = [0] * len(by_line)
        for line, pieces in enumerate(by_line):
            self.totals.sentences += len(pieces)
            for piece in pieces:
                own, task = piece.task, self._known.equal(piece.task) if self._known else piece.task
                piece.task = task
                # Another window's task is done before anyone asks for this one.
                if task is own or task in waiting:
                    waiting.setdefault(task, []).append(line)
                    left[line] += 1
        batches = self._decoder.batches(list(waiting), self._config)
        return _Window(by_line, [workers.submit(self._decoded(batch)) for batch in batches], waiting, left)

    def _decoded(self, batch: list[Task]) -> Callable[[Event], list[Task]]:
        def decode(stopped: Event) -> list[Task]:
            self._decoder.decode(batch, self._config, stopped)
            return batch

        return decode

    def _finished(self, window: _Window, workers: Workers) -> list[list[Piece]]:
        totals = self.totals
        totals.lines += window.left.count(0)
        for batch in workers.results(window.batches):
            for task in batch:
                totals.searched += 1
                totals.tokens += len(task.found[0].tokens)
                for line in window.waiting[task]:
                    window.left[line] -= 1
                    totals.lines += not window.left[line]
            if self._report:
                self._report(totals)
        return window.by_line


class _Known:
    """Tasks met before, those longest unmet forgotten first."""

    def __init__(self, n_best: int) -> None:
        self._n_best, self._bytes = n_best, 0
        self._tasks: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Task] = OrderedDict()

    def equal(self, task: Task) -> Task:
        """The task of the same source and prefix that was met before, else this one."""
        key = task.ids, task.prefix
        if known := self._tasks.get(key):
            self._tasks.move_to_end(key)
            return known
        self._tasks[key] = task
        self._bytes += self._size(task)
        while self._bytes > MOST_REMEMBERED and len(self._tasks) > 1:
            _, old = self._tasks.popitem(last=False)
            self._bytes -= self._size(old)
        return task

    def _size(self, task: Task) -> int:
        tokens = 40 * len(task.ids)  # a number and its place; a target is about as long as its source
        return 600 + tokens + self._n_best * (250 + tokens)
