"""Beams as entries of a table: whatever happens to a grid, what it shows is what the container that moves shows."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.translator.test_cache import FP64, LAYERS, D, Grid, H, Model
from translator.cache import CACHE_KINDS, CacheSpec, DecoderCache, IndirectCache, UnsupportedCacheOperation

pytestmark = pytest.mark.numeric
OPERATIONS = (
    "step", "step", "abandon", "expand", "reorder", "search", "compact", "permute", "admit", "crop", "crop sentences",
    "crop alike", "reset", "convert", "inference",
)  # fmt: skip


@pytest.fixture(autouse=True)
def memory_of_nan() -> Iterator[None]:
    """Memory that nobody has written to is NaN, so that a slot shown by mistake shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3, dtype=FP64).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


class Pair:
    """The same grid in the dynamic container and in another, told the same, and compared bit by bit at every step."""

    def __init__(
        self, model: Model, chance: random.Random, kind: str, B: int, K: int, dtype: torch.dtype = FP64, **options: Any
    ) -> None:
        self.chance = chance
        self.numbers = torch.Generator().manual_seed(chance.randrange(2**20))
        memory, block = torch.randn(B, 3, D, dtype=FP64, generator=self.numbers), chance.choice([1, 8])
        self.caches: list[DecoderCache] = [
            model.decoder.start(memory, kind=each, capacity=room, beams=K, block=block, dtype=dtype, **own)
            for each, room, own in (
                ("dynamic", 40, {}),
                (kind, 300 if kind == "static" else chance.choice([1, 2, 5, 40]), options),
            )
        ]

    @property
    def shape(self) -> tuple[int, int]:
        return self.caches[0].batch_size, self.caches[0].beams

    @property
    def lengths(self) -> list[int]:
        return self.caches[0].lengths.tolist()

    def both(self, operation: str, *given: object) -> None:
        for cache in self.caches:
            getattr(cache, operation)(*given)
        assert torch.equal(self.caches[0].lengths, self.caches[1].lengths)

    def step(self, T: int) -> None:
        dtype, steps = self.caches[0].dtype, [cache.begin(T) for cache in self.caches]
        for layer in range(LAYERS):
            shape = (self.caches[0].rows, H, T, D // H)
            q, k, v = (torch.randn(shape, dtype=FP64, generator=self.numbers).to(dtype) for _ in range(3))
            shares = [step.layers[layer] for step in steps]
            shown = [share.update(k, v) for share in shares]
            assert torch.equal(shown[0][0], shown[1][0]) and torch.equal(shown[0][1], shown[1][1])
            found, expected = (
                scaled_dot_product_attention(q, *kv, attn_mask=share.mask, is_causal=share.is_causal)
                for kv, share in zip(shown, shares, strict=True)
            )
            torch.testing.assert_close(found, expected)
        for cache, step in zip(self.caches, steps, strict=True):
            cache.commit(step)

    def abandon(self, T: int) -> None:
        """A step of NaN in one layer, taken back or left open."""
        rollback = self.chance.random() < 0.5
        for cache in self.caches:
            nan = torch.full((cache.rows, H, T, D // H), float("nan"), dtype=cache.dtype)
            cache.begin(T).layers[0].update(nan, nan)
            if rollback:
                cache.rollback()

    def beam(self) -> Tensor:
        B, K = self.shape
        return torch.randint(K, (B, K), generator=self.numbers)

    def shorter(self) -> Tensor:
        return torch.tensor([self.chance.randint(0, length) for length in self.lengths])


def happen(operation: str, pair: Pair, model: Model) -> None:
    (B, K), chance = pair.shape, pair.chance
    match operation:
        case "step":
            pair.step(chance.randint(1, 4))
        case "abandon":
            pair.abandon(chance.randint(1, 5))
        case "expand" if K == 1:
            pair.both("expand", chance.choice([1, 3, 4]))
        case "reorder":
            pair.both("reorder", pair.beam())
        case "search":
            for _ in range(chance.randint(3, 9)):
                pair.step(1)
                pair.both("reorder", pair.beam())
        case "compact" | "permute":
            kept = B if operation == "permute" else chance.randint(1, B)
            pair.both("compact", torch.tensor(chance.sample(range(B), kept)))
        case "admit":
            slots = chance.sample(range(B), chance.randint(1, B))
            kind, beams = chance.choice(sorted(CACHE_KINDS)), chance.choice([1, K])
            others = Pair(model, chance, kind, len(slots), beams, pair.caches[0].dtype)
            for _ in range(chance.randint(0, 3)):
                others.step(chance.randint(1, 3))
                others.both("reorder", others.beam())
            if chance.random() < 0.5:
                others.both("crop", others.shorter())
            for cache, other in zip(pair.caches, others.caches, strict=True):
                cache.admit(slots, other)
            pair.step(1)
            others.step(1)
        case "crop":
            pair.both("crop", pair.shorter())
        case "crop sentences":  # unequal, but not within a sentence
            pair.both("crop", torch.tensor([min(length, 3 + row // K) for row, length in enumerate(pair.lengths)]))
        case "crop alike":
            pair.both("crop", chance.randint(0, min(pair.lengths)))
        case "reset":
            pair.both("reset")
        case "convert":
            pair.both("to", None, chance.choice([torch.float32, FP64]))
        case "inference":
            with torch.inference_mode():
                pair.step(1)
                pair.both("reorder", pair.beam())


@pytest.mark.parametrize("seed", range(60))
def test_any_history_shows_what_the_container_that_moves_shows(model, seed):
    chance = random.Random(seed)
    pair = Pair(model, chance, "indirect", chance.randint(1, 4), (1, 3, 4)[seed % 3])
    for _ in range(chance.randint(5, 25)):
        happen(chance.choice(OPERATIONS), pair, model)
    pair.step(2)
    pair.step(1)


def states(cache: DecoderCache) -> list[IndirectCache]:
    assert all(isinstance(state, IndirectCache) for state in cache.states)
    return cache.states


def test_keys_and_values_stay_where_they_were_put_and_the_table_is_one(model):
    grid = Grid(model, [3, 2, 4], "indirect", beams=3)
    grid.step(4)
    held = [(state.k, state.k[:, :, :4].clone(), state.v, state.v[:, :, :4].clone()) for state in states(grid.cache)]
    grid.reorder([[2, 0, 0], [1, 1, 1], [0, 2, 1]])
    grid.compact([2, 0])
    for state, (k, k_before, v, v_before) in zip(states(grid.cache), held, strict=True):
        assert state.k is k and torch.equal(k[:, :, :4], k_before)
        assert state.v is v and torch.equal(v[:, :, :4], v_before)
    assert len({id(state.table) for state in states(grid.cache)}) == 1
    grid.step(2)
    other = Grid(model, [3], "indirect", beams=3)
    assert states(other.cache)[0].table is not states(grid.cache)[0].table  # two caches at once
    other.step(3)
    grid.step(1)


def test_beams_that_come_after_sentences_changed_places_write_to_their_own_rows(model):
    """Rows of unequal length beside each other: what one writes is a slot that another still reads."""
    grid = Grid(model, [3, 2, 4], "indirect")
    grid.step(5)
    grid.compact([2, 0])
    grid.crop([2, 5])
    grid.expand(3)
    homes = states(grid.cache)[0].table.home.tolist()
    assert len(set(homes)) == len(homes) == 6
    for _ in range(4):
        grid.step(1)
        grid.reorder([[1, 0, 2], [2, 2, 1]])


def test_rows_of_unequal_length_are_parted_once_and_go_on_by_themselves(model):
    grid = Grid(model, [3, 2], "indirect", beams=3)
    grid.step(3)
    grid.reorder([[1, 1, 1], [2, 0, 1]])
    shared = states(grid.cache)[0].table
    grid.crop([3, 1, 2, 3, 3, 3])
    grid.step(2)
    tables = {id(state.table) for state in states(grid.cache)}
    assert len(tables) == 1 and id(shared) not in tables
    grid.step(1)
    assert {id(state.table) for state in states(grid.cache)} == tables


@pytest.mark.parametrize("into", ["dynamic", "static", "indirect"])
def test_what_a_shorter_beam_leaves_behind_is_not_admitted(model, into):
    """What was taken back stays in its slot here, NaN or not; a container that shows its slots must not get it."""
    waiting = Grid(model, [3], "indirect", beams=3)
    waiting.step(2)
    nan = torch.full((3, H, 3, D // H), float("nan"), dtype=FP64)
    step = waiting.cache.begin(3)
    for layer in step.layers:
        layer.update(nan, nan)
    waiting.cache.commit(step)
    waiting.crop([2, 1, 0])
    grid = Grid(model, [4, 2], into, beams=3)
    grid.step(3)
    grid.admit(1, waiting)
    grid.step(1)
    grid.step(3)
    waiting.step(1)


def test_a_step_over_a_table_is_not_recorded(model):
    cache = model.start(model.sources(3, 3), "indirect")
    with pytest.raises(UnsupportedCacheOperation, match="'indirect' cannot keep its addresses"):
        cache.prefix(1)


def test_a_state_made_alone_has_a_table_of_its_own():
    first, second = (IndirectCache(CacheSpec(kind="indirect", beams=2), 4, H, D // H) for _ in range(2))
    assert first.table is not second.table and first.owns_table and second.owns_table
