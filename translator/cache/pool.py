"""Blocks of K and V that rows are lent and give back: a free list, and how many hold each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from translator.cache.dense import normal_tensors
from translator.cache.prefixes import PrefixIndex
from translator.cache.state import CacheFullError
from translator.device import available_memory


class LayerKey(NamedTuple):
    """Which buffers of a pool a layer keeps its K and V in: caches whose layers are alike have them in common."""

    layer: int
    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class BlockPool:
    """Blocks of `page` tokens (Kwon et al. 2023). Block b is entry b of two buffers a layer, so that one number stands
    for the tokens of every layer and a row is one list of numbers.

    `blocks` are allocated at once and no more. By default there is one for each row of the first cache; the buffers
    double when they run out, as long as what is added takes at most half of the memory that is free then
    (`available_memory`). After that, and with given `blocks` from the start, `require` raises `CacheFullError`.

    Several caches may use a pool at once, from one thread: blocks of one are never another's, unless it admits its
    sentences or finds them by their prefix. Whoever writes to a block that others hold takes a copy first.
    """

    def __init__(self, blocks: int | None = None, page: int = 16) -> None:
        """Raises `ValueError` for sizes below 1."""
        if page < 1 or (blocks is not None and blocks < 1):
            raise ValueError(f"a pool of {blocks} blocks of {page} tokens is impossible")
        self.page = page
        self.fixed = blocks
        self.layers: dict[LayerKey, tuple[Tensor, Tensor]] = {}
        """K and V `(blocks, page, H_kv, D_head)` of each layer."""
        self.references: list[int] = []
        """How many rows, and the index of prefixes, hold each block."""
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._add(blocks or 0)

    @property
    def blocks(self) -> int:
        """Blocks there are, lent or free."""
        return len(self.references)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(part[:1].nbytes for layer in self.layers.values() for part in layer) if self.blocks else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.free} of {self.blocks} blocks of {self.page} tokens free)"

    def attach(self, key: LayerKey, rows: int) -> None:
        """Makes buffers for a layer, if none like it is there; the first cache brings `rows` blocks."""
        if not self.blocks:
            self._add(max(rows, 1))
        if key not in self.layers:
            shape = (self.blocks, self.page, key.heads)
            with normal_tensors():
                k, v = (
                    torch.empty((*shape, width), dtype=key.dtype, device=key.device)
                    for width in (key.width, key.value_width)
                )
            self.layers[key] = k, v

    def move(self, key: LayerKey, device: torch.device | str | None, dtype: torch.dtype | None) -> LayerKey:
        """Moves or converts a layer's buffers; returns their new key."""
        with normal_tensors():
            k, v = (part.to(device, dtype) for part in self.layers.pop(key))
        key = key._replace(dtype=k.dtype, device=k.device)
        self.layers[key] = k, v
        return key

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of a row lie in."""
        return -(-tokens // self.page)

    # -- lending ------------------------------------------------------------------------------------------------------

    def require(self, blocks: int) -> None:
        """Sees to it that so many are free: by growing, then by forgetting prefixes that no row holds, oldest first.

        Raises `CacheFullError` where that isn't enough; nothing has changed then.
        """
        missing = blocks - self.free
        if missing <= 0:
            return
        room = 0 if self.fixed is not None else self._room()
        idle = [block for block in self.prefixes.blocks() if self.references[block] == 1]
        if missing > room + len(idle):
            raise CacheFullError(
                f"paged cache is full: {blocks} blocks of {self.page} tokens are needed, and {self.free} of "
                f"{self.blocks} are free; let sentences leave, or give the pool more blocks"
            )
        if room:
            there = max(self.blocks, 1)
            while there < self.blocks + missing:
                there *= 2
            self._add(min(there - self.blocks, room))
        for block in idle[: max(blocks - self.free, 0)]:
            self.prefixes.forget(block)
            self.release([block])

    def take(self) -> int:
        """A free block, held once; what it holds may be anything."""
        block = self._free.pop()
        self.references[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holds these."""
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One fewer holds these; a block that nobody holds is free."""
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether others hold it too, so that it must not be written."""
        return self.references[block] > 1

    def freed_by(self, rows: Iterable[Sequence[int]]) -> int:
        """How many blocks would be free if these rows gave theirs back."""
        held = Counter(block for row in rows for block in row)
        return sum(self.references[block] == count for block, count in held.items())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks `(from, to)` in every layer."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        for layer in self.layers.values():
            for part in layer:
                part[list(targets)] = part[list(sources)]

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def remember(self, tokens: Sequence[int], blocks: Sequence[int], root: bytes) -> int:
        """Keeps the whole blocks of a row that holds `tokens` for others to find; returns how many tokens these are.

        `root` stands for everything else that K and V depend on.
        """
        added = self.prefixes.add(self._whole(tokens), blocks, root)
        self.hold(added)
        return len(tokens) // self.page * self.page

    def recall(self, tokens: Sequence[int], root: bytes) -> list[int]:
        """The blocks of the longest beginning of `tokens` that was remembered under this root, held by the index."""
        return self.prefixes.find(self._whole(tokens), root)

    def _whole(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        whole = len(tokens) // self.page * self.page
        return [tokens[start : start + self.page] for start in range(0, whole, self.page)]

    # -----------------------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        devices = {key.device for key in self.layers}
        spare = min((available_memory(device) for device in devices), default=0) // 2
        return spare // max(self.block_bytes, 1)

    def _add(self, blocks: int) -> None:
        there = self.blocks
        for key, layer in self.layers.items():
            with normal_tensors():
                grown = tuple(part.new_empty(there + blocks, *part.shape[1:]) for part in layer)
            for new, old in zip(grown, layer, strict=True):
                new[:there] = old
            self.layers[key] = grown  # type: ignore[assignment]
        self.references += [0] * blocks
        self._free += range(there + blocks - 1, there - 1, -1)  # the lowest is lent first
