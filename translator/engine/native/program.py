"""A step recorded as native calls, and replayed in one.

The layers' Python code runs once; every native call that it made is kept. Between two steps only what the calls point
to changes (lengths, ids, the cache), so the next step is the same calls again. What Python computed in between would be
missing: `Watch` sees any operator of PyTorch that isn't a mere view, and such a step is never replayed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from ctypes import Array, addressof
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from translator.engine.native.library import Advance, Call, Kernels

HARMLESS = {torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Watch(TorchDispatchMode):
    """Notices what would be missing from a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: str | None = None
        """The first operator that computed something."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler comes near it; to keep one away, PyTorch would import it, which takes over a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in HARMLESS and self.computed is None:
            self.computed = str(func)
        return func(*args, **(kwargs or {}))


class Entry(NamedTuple):
    """A recorded call: its struct, the fields that point to what it reads, and what it wrote."""

    call: Any
    reads: Sequence[str]
    output: Tensor


class Tape:
    """What a step called, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, call: Any, reads: Sequence[str], output: Tensor) -> None:
        """`call.y` points to `output`; `reads` are the fields that may point to earlier outputs."""
        self.entries.append(Entry(call, reads, output))


class Program:
    """A tape made ready to run again. Its outputs lie in one block of memory, reused as soon as nothing reads them.

    `output` is the last call's.
    """

    def __init__(self, library: Kernels, tape: Tape, lengths: Tensor) -> None:
        """`lengths` `(rows,)` int32 are what the calls read; each run ends with counting the token in them."""
        self._library = library
        self._lengths = lengths
        offsets, size = _placed(tape.entries)
        self._memory = torch.empty(size, dtype=torch.uint8)
        last = tape.entries[-1].output
        _rewritten(tape.entries, [self._memory.data_ptr() + offset for offset in offsets])
        begin = offsets[-1]
        self.output = self._memory[begin : begin + last.nbytes].view(last.dtype).view(last.shape)
        self._advance = Advance(lengths=lengths.data_ptr())
        calls = [*(entry.call for entry in tape.entries), self._advance]
        self._calls: Array[Any] = (Call * len(calls))(*(Call(addressof(call), call.kind) for call in calls))
        self._run = library.run
        self._count = len(calls)
        # The recorded outputs have been read for the last time: their memory goes.
        self._entries = [entry._replace(output=self.output) for entry in tape.entries]

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, rows: int, threads: int) -> None:
        """The step, on the first `rows` rows of what was recorded."""
        self._run(self._calls, self._count, rows, threads)


def _owner(starts: Sequence[int], entries: Sequence[tuple[int, int, int]], address: int | None) -> int | None:
    """Which of `entries` (address, bytes, index), sorted, holds `address`."""
    if not address:
        return None
    place = bisect_right(starts, address) - 1
    if place < 0 or address >= entries[place][0] + entries[place][1]:
        return None
    return entries[place][2]


def _table(entries: Sequence[Entry]) -> tuple[list[int], list[tuple[int, int, int]]]:
    held = sorted((entry.output.data_ptr(), entry.output.nbytes, index) for index, entry in enumerate(entries))
    return [address for address, _, _ in held], held


def _placed(entries: Sequence[Entry]) -> tuple[list[int], int]:
    """Offsets of the outputs in one block, such that none overlaps another that is still to be read; and its size."""
    starts, held = _table(entries)
    last_read = list(range(len(entries)))
    for index, entry in enumerate(entries):
        for name in entry.reads:
            owner = _owner(starts, held, getattr(entry.call, name))
            if owner is not None:
                last_read[owner] = index
    last_read[-1] = len(entries)
    offsets: list[int] = []
    size = 0
    live: list[tuple[int, int, int]] = []  # offset, end, last read
    for index, entry in enumerate(entries):
        live = sorted(part for part in live if part[2] >= index)
        need, offset = -(-entry.output.nbytes // 64) * 64, 0
        for begin, end, _ in live:
            if begin - offset >= need:
                break
            offset = max(offset, end)
        live.append((offset, offset + need, last_read[index]))
        offsets.append(offset)
        size = max(size, offset + need)
    return offsets, size


def _rewritten(entries: Sequence[Entry], addresses: Sequence[int]) -> None:
    """Lets every call read and write at `addresses` what it read and wrote in the outputs."""
    starts, held = _table(entries)
    for index, entry in enumerate(entries):
        for name in entry.reads:
            address = getattr(entry.call, name)
            owner = _owner(starts, held, address)
            if owner is not None:
                setattr(entry.call, name, address - entries[owner].output.data_ptr() + addresses[owner])
        entry.call.y = addresses[index]
