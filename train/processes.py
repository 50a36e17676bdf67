"""Several processes that share each batch, as torchrun starts them: the first leads the run, the others work for it.

Only the leader has the run's folder, its optimiser, log and validations. At each step it sends the others its weights
and their batches, and gets the sum of all gradients back. That is as much to send as adding up gradients everywhere,
and a run follows the same curve with one process and with many. What dropout drops is the same too where the fused
operations train (`train.operations`); in plain PyTorch it is drawn for each process's part of a batch.
"""

import contextlib
import datetime
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

# What is validated or saved between two steps takes its time, and the others wait.
_PATIENCE = datetime.timedelta(days=7)

_CPU = torch.device("cpu")

Share = tuple[Any, ...]
"""What one process is to work on in one step."""


class Processes:
    """The processes of one run, and this one's place among them."""

    def __init__(self, index: int = 0, count: int = 1, device: torch.device = _CPU) -> None:
        self.index, self.count, self.device = index, count, device

    @property
    def leads(self) -> bool:
        """Whether this is the one that leads."""
        return self.index == 0

    def announce(self, what: Any = None) -> Any:
        """What the leader has to say, heard by all."""
        said = [what]
        torch.distributed.broadcast_object_list(said, src=0, device=self.device)
        return said[0]

    def hand_out(self, shares: Sequence[Share | None] | None = None) -> Share | None:
        """This process's share of what the leader hands out; None at the end of the run."""
        got: list[Any] = [None]
        torch.distributed.scatter_object_list(got, list(shares) if shares is not None else None, src=0)
        return got[0]

    def same(self, tensors: Sequence[Tensor]) -> None:
        """Makes all processes' tensors the leader's."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        torch.distributed.broadcast(flat, src=0)
        if not self.leads:
            _spread(flat, tensors)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Puts the sum of all processes' tensors into the leader's."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        torch.distributed.reduce(flat, dst=0)
        if self.leads:
            _spread(flat, tensors)

    def serve(self, make: Callable[[Any], Callable[[Share], None]]) -> None:
        """Works for the leader until it ends the run: `make` gets what it announces, and gives what does a share."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the leader saves first, and then says so
        work = make(self.announce())
        while (share := self.hand_out()) is not None:
            work(share)


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Those that torchrun started, or this one alone; each on a device of its own kind."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count < 2:
        yield Processes(device=device)
        return
    from accelerate import PartialState

    state = PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)
    try:
        yield Processes(state.process_index, state.num_processes, state.device)
    finally:
        state.destroy_process_group()


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
