"""Loss and gradients of a step's batches: on a CPU fused, a thread each; else in plain PyTorch, one after another."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from train.batches import Batch
from train.loss import smoothed_cross_entropy
from train.operations import Casts, FusedModel, can_fuse
from translator.model import TranslationModel

_TOKENS = 2048  # of a batch that is worked on as two


class Backward:
    """What computes the gradients of one model."""

    def __init__(self, model: TranslationModel, smoothing: float, bfloat16: bool) -> None:
        self.model, self.smoothing, self.bfloat16 = model, smoothing, bfloat16
        self.parameters = list(model.parameters())
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.casts = Casts(model, dtype) if can_fuse(model, dtype) else None
        self._count = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def parts(self, batch_tokens: int) -> int:
        """Into how many a batch is to be divided, to be worked on at once.

        By its size alone: what a run gives doesn't depend on how many threads the machine has.
        """
        return 2 * max(1, round(batch_tokens / _TOKENS)) if self.casts is not None else 1

    def run(self, batches: Sequence[Batch], tokens: int) -> float:
        """Puts the gradients of the mean loss of `tokens` target tokens into the parameters, and returns that loss."""
        if self.casts is None:
            return sum(self._plain(batch, tokens) for batch in batches)
        self.casts.refresh()
        # Drawn here, in order: what a thread draws depends on which of them comes first.
        seeds = torch.randint(2**31, (len(batches),)).tolist()
        results = list(self._threads().map(self._fused, batches, [tokens] * len(batches), seeds))
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None
            for _, gradients in results:
                if (gradient := gradients[index]) is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return sum(loss for loss, _ in results)

    def side_by_side(self, works: Sequence[Callable[[], None]]) -> None:
        """Does each of `works`, on a CPU a thread each."""
        if self.casts is None:
            for work in works:
                work()
        else:
            list(self._threads().map(lambda work: work(), works))

    @contextmanager
    def on_one_thread(self) -> Iterator[None]:
        """What the caller does in this block takes one CPU thread, where the work is shared out among threads here.

        Between two passes there is little to do, in many short operations: with two threads each of them ends in
        waiting, long where another program is running.
        """
        before = torch.get_num_threads()
        if self.casts is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            # What a thread sets is also what PyTorch gives threads made later; the caller's is to be that again.
            torch.set_num_threads(torch.get_num_threads())

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # One thread a batch: two threads on one batch would wait for each other at the end of every operation.
            self._pool = ThreadPoolExecutor(self._count, "training", torch.set_num_threads, (1,))
        return self._pool

    def _fused(self, batch: Batch, tokens: int, seed: int) -> tuple[float, tuple[Tensor | None, ...]]:
        assert self.casts is not None
        operations = FusedModel(self.model, self.casts, seed)
        hidden = self.model.packed(
            batch.source, batch.target_in, batch.source_packing, batch.target_packing, operations
        )
        loss = operations.loss(hidden, batch.target_out, self.smoothing, 1 / tokens)
        return float(loss.detach()), torch.autograd.grad(loss, self.parameters, allow_unused=True)

    def _plain(self, batch: Batch, tokens: int) -> float:
        device = batch.source.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.packed(batch.source, batch.target_in, batch.source_packing, batch.target_packing)
            logits = self.model.logits(hidden)
        loss = smoothed_cross_entropy(logits, batch.target_out, self.smoothing) / tokens
        loss.backward()
        return float(loss.detach())
