"""Threads that decode batches side by side, and the layout of a machine's threads among them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from threading import Event
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")


def layout(workers: int | None, threads: int, device: torch.device) -> tuple[int, int]:
    """How many batches are decoded at once, and with how many CPU threads each, of `threads` in all.

    By default as many as there are threads: two batches on one thread each leave no core waiting at the end of every
    operation, as one batch on two does. On a GPU one, which has the whole of it.
    """
    count = workers or (threads if device.type == "cpu" else 1)
    return count, max(1, threads // count)


class Workers:
    """Runs calls in the order they come, on `count` threads of `threads` CPU threads each, until the block ends.

    A call takes an event that is set when it should give up. The first call waits to see whether another comes: one
    alone is run by whoever asks for its result, with all the threads that PyTorch gives there.
    """

    def __init__(self, count: int, threads: int) -> None:
        self._count, self._threads = count, threads
        self._stopped = Event()
        self._first: Callable[[], None] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            # What a thread sets is also what PyTorch gives threads made later; the caller's is to be that again.
            torch.set_num_threads(torch.get_num_threads())

    def submit(self, call: Callable[[Event], T]) -> "Future[T]":
        """`call`, to be run soon."""
        future: Future[T] = Future()
        run = partial(self._run, future, call)
        if self._pool is None and self._first is None:
            self._first = run
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, "translator", torch.set_num_threads, (self._threads,))
        if self._first is not None:
            self._pool.submit(self._first)
            self._first = None
        self._pool.submit(run)
        return future

    def results(self, futures: "Sequence[Future[T]]") -> Iterator[T]:
        """What calls gave, as they finish; raises what one of them raised."""
        if self._first is not None:
            first, self._first = self._first, None
            first()
        for future in as_completed(futures):
            yield future.result()

    def _run(self, future: "Future[T]", call: Callable[[Event], T]) -> None:
        try:
            future.set_result(call(self._stopped))
        except BaseException as error:
            future.set_exception(error)
