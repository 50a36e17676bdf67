"""Host memory of two kinds: page-locked, which a GPU copies from while it computes, and mapped to a file."""

import mmap
import tempfile
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from translator.cache.dense import normal_tensors


class MappedFile:
    """A tensor in a file without a name: it is gone with the tensor, or with the process.

    Its pages are in memory while they are used. `come` and `go` are advice to the system, no more: results are the
    same where it takes none.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = max(prod(shape) * dtype.itemsize, 1)
        with tempfile.TemporaryFile(prefix="translator-") as file:  # the mapping outlives it
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        with normal_tensors():
            self.tensor: Tensor = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape)).view(*shape)

    def come(self) -> None:
        """Begins to read what isn't in memory."""
        self._advise("MADV_WILLNEED")

    def go(self) -> None:
        """Gives the process's pages back; the file keeps what they hold."""
        self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        advice = getattr(mmap, name, None)
        if advice is not None:
            self._memory.madvise(advice)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Page-locked memory where there is a GPU to copy from it, else memory like any other."""
    with normal_tensors():
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())
