"""Loss and gradients of a step's batches: on a CPU fused, a thread each; else in plain PyTorch, one after another."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from train.batches import Batch
from train.loss import smoothed_cross_entropy
from train.operations import Casts, FusedModel, can_fuse
from train.processes import Processes, Share
from translator.config import ModelConfig
from translator.model import TranslationModel

_TOKENS = 2048  # of a batch that is worked on as two


class Backward:
    """What computes the gradients of one model, in this process or in several."""

    def __init__(
        self, model: TranslationModel, smoothing: float, bfloat16: bool, processes: Processes | None = None
    ) -> None:
        self.processes = processes or Processes()
        self.model, self.smoothing, self.bfloat16 = model, smoothing, bfloat16
        self.parameters = list(model.parameters())
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.casts = Casts(model, dtype) if can_fuse(model, dtype) else None
        self._count = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._in_step = False

    def parts(self, batch_tokens: int) -> int:
        """Into how many a batch is to be divided, to be worked on at once.

        By its size and the number of processes alone: what a run gives doesn't depend on how many threads there are.
        """
        parts = 2 * max(1, round(batch_tokens / _TOKENS)) if self.casts is not None else 1
        return math.ceil(parts / self.processes.count) * self.processes.count

    def begin(self) -> None:
        """Before the first step: tells the other processes what to compute with."""
        if self.processes.count > 1:
            config = dataclasses.asdict(self.model.config)
            self.processes.announce((config, self.parameters[0].dtype, self.smoothing, self.bfloat16))

    def run(self, batches: Sequence[Batch], tokens: int) -> float:
        """Puts the gradients of the mean loss of `tokens` target tokens into the parameters, and returns that loss."""
        # Drawn here, in order: what a thread or a process draws depends on which of them comes first.
        seeds = torch.randint(2**31, (len(batches),)).tolist()
        count = self.processes.count
        if count == 1:
            return self.share(batches, tokens, seeds)
        shares = [(list(batches[start::count]), tokens, seeds[start::count]) for start in range(count)]
        # What is sent goes by way of the host's memory, whatever device it comes from.
        sent = [([batch.to("cpu") for batch in own], *rest) for own, *rest in shares[1:]]
        self._in_step = True
        mine = self.processes.hand_out([shares[0], *sent])
        assert mine is not None
        loss = self.shared(*mine)
        self._in_step = False
        return loss

    def shared(self, batches: Sequence[Batch], tokens: int, seeds: Sequence[int]) -> float:
        """`share` with the leader's weights, and with all processes' shares added up in the leader."""
        self.processes.same(self.parameters)
        loss = torch.tensor([self.share(batches, tokens, seeds)], dtype=self.parameters[0].dtype, device=self.device)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.add_up([loss, *(parameter.grad for parameter in self.parameters if parameter.grad is not None)])
        return float(loss)

    def share(self, batches: Sequence[Batch], tokens: int, seeds: Sequence[int]) -> float:
        """What `run` does, of some of a step's batches."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.casts is None:
            return sum(self._plain(batch, tokens, seed) for batch, seed in zip(batches, seeds, strict=True))
        self.casts.refresh()
        results = list(self._threads().map(self._fused, batches, [tokens] * len(batches), seeds))
        for index, parameter in enumerate(self.parameters):
            for _, gradients in results:
                if (gradient := gradients[index]) is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return sum(loss for loss, _ in results)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.parameters[0].device

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
        """Ends the threads, and the other processes' work."""
        # Where this one failed within a step, the others wait for its gradients and would never hear of an end;
        # torchrun ends them with it.
        if self.processes.count > 1 and self.processes.leads and not self._in_step:
            self.processes.hand_out([None] * self.processes.count)
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

    def _plain(self, batch: Batch, tokens: int, seed: int) -> float:
        batch = batch.to(self.device)
        with (
            torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16),
        ):
            torch.manual_seed(seed)  # in every process alike, and without a trace in what is drawn next
            hidden = self.model.packed(batch.source, batch.target_in, batch.source_packing, batch.target_packing)
            logits = self.model.logits(hidden)
        loss = smoothed_cross_entropy(logits, batch.target_out, self.smoothing) / tokens
        loss.backward()
        return float(loss.detach())


def serve(processes: Processes) -> None:
    """What a process that doesn't lead does: gradients, until the run ends."""

    def make(told: Any) -> Callable[[Share], None]:
        config, dtype, smoothing, bfloat16 = told
        model = TranslationModel(ModelConfig(**config)).to(processes.device, dtype).train()
        backward = Backward(model, smoothing, bfloat16, processes)

        def work(share: Share) -> None:
            with backward.on_one_thread():
                backward.shared(*share)

        return work

    processes.serve(make)
