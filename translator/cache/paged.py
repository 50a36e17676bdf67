"""The container in blocks: a row is a list of blocks of a pool, and rows that go on from the same tokens share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from translator.cache.block_table import BlockCount, BlockTable
from translator.cache.lengths import Lengths
from translator.cache.pool import BlockPool, LayerKey
from translator.cache.prefixes import PrefixIndex
from translator.cache.spec import CacheSpec, register
from translator.cache.state import KeyValueState, LayerState, UnsupportedCacheOperation
from translator.cache.step import Step, View

if TYPE_CHECKING:
    from translator.cache.decoder_cache import DecoderCache

TABLE = "blocks"


@register
class PagedCache(KeyValueState):
    """Rows in blocks of a `BlockPool`: `expand` and `reorder` share blocks, and a row that goes on from an unfinished
    block that others hold copies it first.

    A step gathers what it shows (a kernel that reads the table is another matter), so that this container saves memory
    and not time. What lies in a block beyond a row's length may be anything, and is zero when shown. The table is on
    the host: `reorder` by indices on a device waits for them. `CacheSpec.capacity` doesn't matter.
    """

    kind = "paged"
    options = ("page", "blocks")
    by_reference = True
    uneven = True

    def __init__(
        self,
        spec: CacheSpec,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        value_width: int | None = None,
    ) -> None:
        shared: dict[str, Any] = getattr(spec, "shared", {})
        self.owns_table = TABLE not in shared
        if self.owns_table:
            pool = spec.pool or self.new_pool(spec)
            shared[TABLE] = BlockTable(pool, rows)
        self.table: BlockTable = shared[TABLE]
        empty = torch.empty(0, dtype=dtype, device=device)
        self.layer = len(self.table.keys)
        key = LayerKey(self.layer, heads, width, value_width or width, empty.dtype, empty.device)
        self.table.keys.append(key)
        self.table.pool.attach(key, rows)
        self.turn = 0

    @classmethod
    def new_pool(cls, spec: CacheSpec) -> BlockPool:
        """See `KeyValueState.new_pool`."""
        return BlockPool(spec.blocks, spec.page)

    @property
    def pool(self) -> BlockPool:
        """The pool that its blocks are of."""
        return self.table.pool

    @classmethod
    def account(
        cls, spec: CacheSpec, rows: int, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype
    ) -> int:
        """See `KeyValueState.account`: rows that share nothing, in a pool of their own that started with a block each.

        Beams take less: they share what they have in common.
        """
        blocks, needed = rows, rows * -(-length // spec.page)
        while blocks < needed:
            blocks *= 2
        return (spec.blocks or blocks) * spec.page * heads * sum(widths) * dtype.itemsize

    @classmethod
    def account_shared(cls, spec: CacheSpec, rows: int, length: int) -> int:
        """See `KeyValueState.account_shared`: the table, eight bytes for each block of a row."""
        return rows * -(-length // spec.page) * 8

    @property
    def count(self) -> BlockCount:
        """Blocks that the rows of this cache hold, each in all layers, against those of a copy for each row."""
        return self.table.count

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """K and V of this layer, `(blocks, page, H_kv, D_head)`, whoever holds the blocks."""
        return self.pool.layers[self.table.keys[self.layer]]

    @property
    def k(self) -> Tensor:
        """K of this layer's blocks."""
        return self.buffers[0]

    @property
    def v(self) -> Tensor:
        """V of this layer's blocks."""
        return self.buffers[1]

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's buffers, of all that use the pool; the first layer counts the table."""
        return sum(part.nbytes for part in self.buffers) + (self.table.nbytes if self.owns_table else 0)

    def begin(self, step: Step) -> View:
        """Blocks for the step; shown are the tokens, rounded up to `step.block`."""
        self.table.begin(step)
        return View(-(-step.end // step.block) * step.block)

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` into the slots of `step`, each row in its blocks."""
        places = self.table.flat(view.visible, k.device)
        places = places.narrow(1, step.start or 0, step.T) if step.slots is None else places.gather(1, step.slots)
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            if new.shape != (len(places), buffer.shape[2], step.T, buffer.shape[3]):  # one row or token would broadcast
                raise ValueError(f"K or V {tuple(new.shape)} for a step of {step.T} tokens on {len(places)} rows")
            _put(buffer, places, new)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`, gathered; slots beyond a row's length are zero."""
        k, v = self._gathered(slice(None), view.visible)
        hidden = self.table.hidden(view.visible, k.device)
        if hidden is not None:
            k, v = k.masked_fill_(hidden, 0), v.masked_fill_(hidden, 0)
        return k.transpose(1, 2), v.transpose(1, 2)

    def expand(self, beams: int, length: int) -> None:
        """Gives every row `beams - 1` neighbours that hold the same blocks."""
        self.turn += 1
        self.table.expand(beams, self.turn)

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`: in the table."""
        self.turn += 1
        self.table.select(rows, self.turn)

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """`k` and `v` `(rows, H_kv, length, D_head)`, gathered; beyond a row's own length they may be anything."""
        k, v = self._gathered(rows, length)
        return {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`, in new blocks; neighbours share them where there are fewer contents."""
        if contents.keys() != {"k", "v"}:
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        self.turn += 1
        different = len(contents["k"])
        self.table.renew(rows, different, self.pool.blocks_for(length), self.turn)
        if not different:
            return
        firsts = slice(rows.start, rows.stop, (rows.stop - rows.start) // different)
        for buffer, new in zip(self.buffers, (contents["k"], contents["v"]), strict=True):
            _put(buffer, self.table.flat(length, buffer.device)[firsts], new.to(buffer.device))

    def admit(self, rows: slice, source: LayerState, theirs: slice, length: int) -> None:
        """See `LayerState.admit`: the blocks of a cache of the same pool are shared; what another gives is copied."""
        if not self._may_share(source):
            self.write(rows, source.read(theirs, length), length)
            return
        assert isinstance(source, PagedCache)
        kept = self.pool.blocks_for(length)
        self.turn += 1
        self.table.adopt(rows, [row[:kept] for row in source.table.rows[theirs]], self.turn)

    def adopt(self, rows: slice, blocks: list[int]) -> None:
        """These rows hold `blocks`, shared with whoever else does."""
        self.turn += 1
        self.table.adopt(rows, [blocks], self.turn)

    def check_admit(self, rows: Sequence[slice], source: LayerState, lengths: Sequence[int], beams: int) -> None:
        """See `LayerState.check_admit`."""
        if self._may_share(source):
            return
        wanted = most = 0
        for mine, length in zip(rows, lengths, strict=True):
            wanted += beams * self.pool.blocks_for(length) - self.pool.freed_by(self.table.rows[mine])
            most = max(most, wanted)
        self.pool.require(most)

    def clear(self, lengths: Lengths, until: int) -> None:
        """Gives back the blocks beyond each row's length; what is left of the last one is hidden when shown."""
        self.table.clear(lengths)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts this layer's buffers; refused while another cache holds blocks of the pool."""
        if self.layer == 0 and self.pool.blocks - self.pool.free > self.count.held:
            raise self.cannot("be moved or converted while others hold blocks of its pool")
        self.table.keys[self.layer] = self.pool.move(self.table.keys[self.layer], device, dtype)
        self.table.forget_places()

    def _may_share(self, source: LayerState) -> bool:
        return isinstance(source, PagedCache) and source.pool is self.pool and source.table.keys == self.table.keys

    def _gathered(self, rows: slice, visible: int) -> tuple[Tensor, Tensor]:
        k, v = self.buffers
        flat = self.table.flat(visible, k.device)[rows]
        return _taken(k, flat), _taken(v, flat)


def _taken(buffer: Tensor, places: Tensor) -> Tensor:
    _, _, heads, width = buffer.shape
    return buffer.view(-1, heads * width).index_select(0, places.reshape(-1)).view(*places.shape, heads, width)


def _put(buffer: Tensor, places: Tensor, new: Tensor) -> None:
    """`new` `(rows, H, T, D_head)` into the slots `places` `(rows, T)` of a pool's buffer."""
    width = buffer.shape[2] * buffer.shape[3]
    flat = new.to(buffer.dtype).transpose(1, 2).reshape(-1, width)
    buffer.view(-1, width).index_copy_(0, places.reshape(-1), flat)


def remember(cache: DecoderCache, row: int, tokens: Sequence[int], about: bytes) -> int:
    """Keeps the whole blocks of a row that holds `tokens`, for `recall` in any cache of the pool to find.

    `about` tells what K and V depend on beside the tokens: the weights, and the source that they are a translation
    of. Returns how many tokens of the row can be found. Raises `ValueError` for more tokens than the row holds, and
    `UnsupportedCacheOperation` where a layer isn't paged.
    """
    table = _table(cache)
    if len(tokens) > int(cache.lengths[row]):
        raise ValueError(f"row {row} holds {int(cache.lengths[row])} tokens, not {len(tokens)}")
    return table.pool.remember(tokens, table.rows[row], _root(table, about))


def recall(cache: DecoderCache, sentence: int, tokens: Sequence[int], about: bytes) -> int:
    """Lets the empty rows of a sentence begin with what was remembered of `tokens`; returns how many that is.

    The rest has to be stepped, and the last of `tokens` too if its logits are needed: leave it out. Raises
    `ValueError` where a row already holds something, `UnsupportedCacheOperation` where a layer isn't paged.
    """
    table, beams = _table(cache), cache.beams
    rows = slice(sentence * beams, (sentence + 1) * beams)
    if bool(cache.lengths[rows].any()):
        raise ValueError(f"sentence {sentence} isn't empty: only at the beginning of a row can a prefix be found")
    cache.rollback()
    blocks = table.pool.recall(tokens, _root(table, about))
    for state in cache.states:
        state.adopt(rows, blocks)  # type: ignore[attr-defined]
    cache.hold(rows, len(blocks) * table.pool.page)
    return len(blocks) * table.pool.page


def _table(cache: DecoderCache) -> BlockTable:
    for state in cache.states:
        if not isinstance(state, PagedCache):
            raise UnsupportedCacheOperation(f"cache kind {state.kind!r} cannot share the blocks of a prefix")
    return cache.states[0].table  # type: ignore[attr-defined]


def _root(table: BlockTable, about: bytes) -> bytes:
    return PrefixIndex.root(repr(table.keys).encode(), about)
