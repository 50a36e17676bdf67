"""The memory in which one decoding after another runs, and the steps recorded over it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from translator.cache import CacheSpec, DecoderCache, DenseCache, Lengths, View
from translator.cache.dense import whole_blocks
from translator.engine.base import MatrixScores
from translator.model import TranslationModel

Work = Callable[[], None]
"""Reads and writes tensors that stay where they are, and nothing else."""

Recorder = Callable[[Work], Work]
"""Runs a piece of work once or not at all, and gives what runs it again."""

SPARE = 7
"""Best tokens kept beyond one a beam: a search asks for one more, and for as many again as are banned."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an arena has room for: `sentences` of `beams` rows, `capacity` target and `source` tokens each, K and V in
    `dtype`; tokens are shown in whole blocks of `block`."""

    sentences: int
    beams: int
    capacity: int
    source: int
    block: int
    dtype: torch.dtype | None

    def holds(self, other: "Room") -> bool:
        """Whether a decoding that asks for `other` can run in this one."""
        return self.sentences >= other.sentences and (self.beams, self.capacity, self.source, self.dtype) == (
            other.beams,
            other.capacity,
            other.source,
            other.dtype,
        )


class Arena:
    """Every tensor that a step reads or writes, allocated once; and one recorded step for each bucket.

    A bucket is (sentences, a power of two; target tokens and source tokens shown, in whole blocks). Steps of one
    bucket differ in nothing but what the tensors hold: `tokens` `(rows,)`, `positions` `(rows, 1)`, `parents`
    `(rows,)`, `source_mask` `(sentences, 1, 1, source)`, and K and V. Rows beyond a decoding's own are computed too,
    over finite numbers, and nobody looks at them.
    """

    def __init__(self, model: TranslationModel, room: Room, recorder: Recorder) -> None:
        """Raises `UnsupportedCacheOperation` for a structure whose state has no fixed place."""
        self.model, self.room, self.record = model, room, recorder
        self.operations = model.operations()
        weight = model.embedding.weight
        device, rows = weight.device, room.sentences * room.beams
        spec = CacheSpec(
            kind="static",
            capacity=room.capacity,
            beams=room.beams,
            block=room.block,
            dtype=room.dtype,
            sentences=room.sentences,
            source_capacity=room.source,
        )
        self.cache = model.start(weight.new_zeros(1, 1, model.config.d_model), None, spec)
        self.cache.prefix(1)
        for state in self.cache.states:  # zeroed once: what a view shows beyond a row's length must not be NaN
            assert isinstance(state, DenseCache)
            state.shown(View(whole_blocks(room.capacity, room.block)))
        with torch.inference_mode(False):
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.parents = torch.arange(rows, device=device)
            shape = (room.sentences, 1, 1, room.source)
            self.source_mask = torch.zeros(shape, dtype=self.cache.dtype, device=device)
            # Scores of every bucket: recorded steps that kept their own would hold as much for each.
            V = model.config.vocab_size
            wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
            self.logits = torch.zeros(rows, V, dtype=wide, device=device)
            self.log_z = torch.zeros(rows, dtype=torch.float64, device=device)
            self.best = torch.zeros(rows, min(room.beams + SPARE, V), dtype=wide, device=device)
            self.best_ids = torch.zeros(self.best.shape, dtype=torch.int64, device=device)
        self._used = 0
        self._recorded: dict[tuple[str, int, int, int], Work] = {}

    @property
    def buckets(self) -> int:
        """Steps and moves recorded so far."""
        return len(self._recorded)

    def begin(self, started: DecoderCache) -> DecoderCache:
        """A cache of the sentences of `started` in this memory, nothing decoded yet. Raises `ValueError` without room.

        The one before it is over.
        """
        longest = started.sources[0].length
        if longest > self.room.source:
            raise ValueError(f"a source of {longest} tokens doesn't fit a grid with room for {self.room.source}")
        for state in self.cache.states:
            state.clear(Lengths(self.cache.rows), self._used)
        self._used = 0
        cache = self.cache.prefix(started.batch_size)
        cache.reset(started)
        return cache

    def load(self, cache: DecoderCache) -> None:
        """Brings positions and the source's mask to the device, after what a step doesn't change has changed."""
        lengths = torch.zeros(len(self.positions), dtype=torch.int64)  # 0 for rows beyond the cache's own
        lengths[: cache.rows] = cache.lengths
        to_device(lengths.unsqueeze(1), self.positions)
        B, S = cache.batch_size, cache.sources[0].length
        seen = torch.zeros(self.room.sentences, self.room.source, dtype=torch.bool, device=cache.device)
        seen[:B, :S] = True if cache.source_visible is None else cache.source_visible
        seen |= ~seen.any(dim=1, keepdim=True)  # a sentence that isn't there: some kernels make NaN of no key at all
        self.source_mask.zero_().masked_fill_(~seen[:, None, None, :], float("-inf"))

    def used(self, slots: int) -> None:
        """Slots below `slots` hold something, to be cleared before another decoding."""
        self._used = max(self._used, slots)

    def step(self, cache: DecoderCache) -> None:
        """One token for every row, from `tokens`, into K and V, `logits`, `log_z`, `best` and `best_ids`."""
        block = self.room.block
        visible, source = whole_blocks(cache.length + 1, block), whole_blocks(cache.sources[0].length, block)
        self.used(visible)
        self._run("step", self._one_token, (self._bucket(cache), visible, source))

    def move(self, cache: DecoderCache, parents: Tensor) -> None:
        """Every row goes on from the row that `parents` `(rows,)` gives."""
        to_device(parents, self.parents[: len(parents)])  # rows beyond move as they did: within their own sentence
        shown = whole_blocks(max(cache.length, 1), self.room.block)
        self._run("move", self._select, (self._bucket(cache), shown, 0))

    def _bucket(self, cache: DecoderCache) -> int:
        return min(power_of_two(cache.batch_size), self.room.sentences)

    def _run(self, kind: str, work: Callable[[int, int, int], None], bucket: tuple[int, int, int]) -> None:
        known = self._recorded.get((kind, *bucket))
        if known is None:
            # A recorder may run the work once: that must leave no trace.
            positions, parents = self.positions.clone(), self.parents.clone()
            torch.arange(len(parents), out=self.parents)
            known = self.record(partial(work, *bucket))
            self.positions.copy_(positions)
            self.parents.copy_(parents)
            self._recorded[kind, *bucket] = known
        known()

    # -- what is recorded: no shape and no number below changes within a bucket ------------------------------------

    def _one_token(self, sentences: int, visible: int, source: int) -> None:
        model, ops, rows = self.model, self.operations, sentences * self.room.beams
        positions = self.positions[:rows]
        part = self.cache.prefix(sentences, source)
        step = part.begin_fixed(positions, visible, self.source_mask[:sentences, :, :, :source])
        x = ops.embed_target(self.tokens[:rows].unsqueeze(1), positions)
        hidden = model.decoder.run(x, step.layers, ops.decoder)  # (rows, 1, D)
        logits = self.logits[:rows].copy_(ops.logits(hidden[:, -1]))
        self.log_z[:rows].copy_(MatrixScores(logits).log_z)
        best, ids = logits.topk(self.best.shape[1], dim=1)
        self.best[:rows].copy_(best)
        self.best_ids[:rows].copy_(ids)
        positions.add_(1)

    def _select(self, sentences: int, visible: int, _: int) -> None:
        rows = sentences * self.room.beams
        for state in self.cache.states:
            assert isinstance(state, DenseCache)
            for buffer in (state.k, state.v):  # all rows: which of them move must not be asked
                shown = buffer[:rows, :, :visible]
                shown.copy_(shown.index_select(0, self.parents[:rows]))


def power_of_two(count: int) -> int:
    """The least power of two that isn't below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def to_device(values: Tensor, place: Tensor) -> None:
    """Copies `values` to `place`; from the host without waiting for the device."""
    if place.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    place.copy_(values, non_blocking=True)
