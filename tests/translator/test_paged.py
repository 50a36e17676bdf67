"""Rows as lists of blocks: they show what rows of their own would, hold less, and a full pool loses nothing."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_model64
from tests.translator.search.test_with_a_model import LIMITS, SOURCES, of_model
from tests.translator.test_cache import FP64, LAYERS, D, Grid, H, Model
from tests.translator.test_indirect import OPERATIONS, Pair, happen, memory_of_nan
from translator.cache import (
    BlockPool,
    CacheFullError,
    CacheSpec,
    DecoderCache,
    PagedCache,
    UnsupportedCacheOperation,
    pool,
    recall,
    remember,
)
from translator.config import DecodeConfig
from translator.engine.eager import EagerEngine
from translator.search import Driver, starter

__all__ = ["memory_of_nan"]  # a fixture for every test here
pytestmark = pytest.mark.numeric
ABOUT = b"these weights, this source"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def table(cache: DecoderCache) -> Any:
    assert all(isinstance(state, PagedCache) for state in cache.states)
    return cache.states[0].table


def spoil(cache: DecoderCache, value: float = float("nan")) -> None:
    """Writes over every slot of the pool in which no row of this cache, the only one, holds a token."""
    blocks, page = table(cache).pool, table(cache).pool.page
    held = [0] * blocks.blocks
    for row, length in zip(table(cache).rows, cache.lengths.tolist(), strict=True):
        for place, block in enumerate(row):
            held[block] = max(held[block], min(length - place * page, page))
    for part in (part for layer in blocks.layers.values() for part in layer):
        for block, filled in enumerate(held):
            part[block, filled:] = value


# -- the same as a container in which every row has its own -----------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_any_history_shows_what_the_container_that_moves_shows(model, seed):
    chance = random.Random(seed)
    blocks = BlockPool(page=chance.choice([1, 2, 3, 16]))
    K = (1, 3, 4)[seed % 3]
    pair = Pair(model, chance, "paged", chance.randint(1, 4), K, pool=blocks)
    for _ in range(chance.randint(5, 25)):
        operation = chance.choice([*OPERATIONS, "admit of the pool", "spoil"])
        if operation == "spoil":
            spoil(pair.caches[1], chance.choice([float("nan"), float("inf"), 1e30]))
        elif operation == "admit of the pool":
            admit_of_the_pool(pair, model, blocks)
        else:
            happen(operation, pair, model)
        held = {block for row in table(pair.caches[1]).rows for block in row}
        assert blocks.blocks - blocks.free == len(held)  # none is lost, none is both free and held
    pair.step(2)
    pair.step(1)


def admit_of_the_pool(pair: Pair, model: Model, blocks: BlockPool) -> None:
    (B, K), chance = pair.shape, pair.chance
    slots, beams = chance.sample(range(B), chance.randint(1, B)), chance.choice([1, K])
    others = Pair(model, chance, "paged", len(slots), beams, pair.caches[0].dtype, pool=blocks)
    for _ in range(chance.randint(0, 3)):
        others.step(chance.randint(1, 3))
        others.both("reorder", others.beam())
    if chance.random() < 0.5:
        others.both("crop", others.shorter())
    free = blocks.free
    for cache, other in zip(pair.caches, others.caches, strict=True):
        cache.admit(slots, other)
    assert blocks.free >= free  # shared, not copied
    pair.step(1)
    others.step(1)  # both go on in the blocks that they share
    pair.step(2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_what_lies_in_released_blocks_and_beyond_a_rows_length_does_no_harm(model, value):
    grid = Grid(model, [3, 2, 4], "paged", page=4)
    grid.step(7)
    grid.compact([2, 0])
    grid.crop([2, 5])
    spoil(grid.cache, value)
    grid.step(1)
    grid.expand(3)
    spoil(grid.cache, value)
    grid.step(2)
    grid.step(1)


@pytest.mark.parametrize("page", [1, 3, 4])
def test_a_step_that_breaks_off_gives_its_blocks_back(model, page):
    grid = Grid(model, [3, 2], "paged", page=page)
    grid.step(5)
    grid.expand(3)
    before = [list(row) for row in table(grid.cache).rows]
    nan = torch.full((6, H, 4, D // H), float("nan"), dtype=FP64)
    grid.cache.begin(4).layers[0].update(nan, nan)  # the second layer never comes
    grid.cache.rollback()
    assert [len(row) for row in table(grid.cache).rows] == [len(row) for row in before]
    grid.reorder([[1, 0, 2], [2, 2, 1]])
    grid.step(3)


# -- what is shared ---------------------------------------------------------------------------------------------------


def test_expand_shares_whole_blocks_and_the_first_to_go_on_copies_the_unfinished_one(model):
    grid = Grid(model, [3], "paged", page=4)
    grid.step(10)
    grid.expand(3)
    assert grid.cache.states[1].count == (3, 9)
    first = list(table(grid.cache).rows[0])
    grid.step(1)
    rows = table(grid.cache).rows
    assert [row[:2] for row in rows] == [first[:2]] * 3 and len({row[2] for row in rows}) == 3
    assert grid.cache.states[0].count == (2 + 3, 9)
    assert first[2] in {row[2] for row in rows}  # the last to write needs no copy
    grid.step(1)
    assert grid.cache.states[0].count == (5, 9)


def test_reorder_and_compact_move_the_table_once_and_nothing_else(model):
    grid = Grid(model, [3, 2, 4], "paged", beams=3, page=2)
    grid.step(4)
    held = [(state.k, state.k.clone(), state.v, state.v.clone()) for state in grid.cache.states]
    grid.reorder([[2, 0, 0], [1, 1, 1], [0, 2, 1]])
    grid.compact([2, 0])
    for state, (k, k_before, v, v_before) in zip(grid.cache.states, held, strict=True):
        assert state.k is k and torch.allclose(k, k_before, equal_nan=True, rtol=0, atol=0)
        assert state.v is v and torch.allclose(v, v_before, equal_nan=True, rtol=0, atol=0)
    assert len({id(state.table) for state in grid.cache.states}) == 1
    grid.step(2)


def test_blocks_come_back_from_crop_compact_reset_and_a_cache_that_goes(model):
    blocks = BlockPool(blocks=30, page=2)
    grid = Grid(model, [3, 2, 4], "paged", pool=blocks)
    grid.step(9)
    assert blocks.free == 30 - 3 * 5
    grid.crop([9, 3, 0])
    assert blocks.free == 30 - 5 - 2
    grid.compact([1, 2])
    assert blocks.free == 30 - 2
    for length in (4, 11, 1):  # one object for many sentences
        grid.cache.reset()
        grid.history = [torch.zeros(0, dtype=torch.int64)] * 2
        assert blocks.free == 30
        grid.step(length)
    del grid
    assert blocks.free == 30


def test_a_beam_search_holds_less_than_a_copy_for_each_beam():
    """And what it finds is what it finds with copies: see the tests of searches, which run for every kind."""
    config = DecodeConfig(beam_size=4)
    spec = CacheSpec(kind="paged", beams=4, page=2)
    driver = Driver(config, starter(EagerEngine(tiny_model64()), spec), room=3)
    waiting = list(zip(SOURCES, of_model(LIMITS), strict=True))
    held = copied = 0
    pools = {}
    while driver.busy or waiting:
        if waiting:  # the batch runs on while sentences come and go
            source, sentence = waiting.pop()
            driver.add(sentence, source)
        driver.step()
        if driver._decoding is not None:
            state = driver._decoding.cache.states[0]
            pools[id(state.pool)] = state.pool
            assert state.pool.blocks - state.pool.free == state.count.held <= state.count.copied
            held, copied = held + state.count.held, copied + state.count.copied
    assert 0 < held < 0.8 * copied, (held, copied)
    (blocks,) = pools.values()  # newcomers come from the same pool, into a larger grid too
    del driver, state
    assert blocks.free == blocks.blocks


# -- a pool that runs out ---------------------------------------------------------------------------------------------


def test_a_pool_that_runs_out_in_the_middle_of_a_batch_loses_nothing(model):
    blocks = BlockPool(blocks=8, page=2)
    grid = Grid(model, [3, 2, 4], "paged", pool=blocks)
    grid.step(3)
    grid.step(1)  # 2 blocks a row, 2 of 8 free
    before = [list(row) for row in table(grid.cache).rows], [part.clone() for part in grid.cache.states[1].buffers]
    with pytest.raises(CacheFullError, match="paged cache is full: 3 blocks of 2 tokens are needed, and 2 of 8 are"):
        grid.cache.begin(1)
    assert table(grid.cache).rows == before[0] and blocks.free == 2 and grid.cache.lengths.tolist() == [4, 4, 4]
    for part, old in zip(grid.cache.states[1].buffers, before[1], strict=True):
        assert torch.allclose(part, old, equal_nan=True, rtol=0, atol=0)
    grid.compact([0, 2])
    grid.step(1)
    grid.step(3)
    with pytest.raises(CacheFullError):
        grid.cache.begin(1)
    grid.crop([8, 6])
    grid.compact([1])
    grid.step(2)


def test_beams_that_part_need_blocks_too(model):
    blocks = BlockPool(blocks=5, page=4)
    grid = Grid(model, [3], "paged", pool=blocks)
    grid.step(6)
    grid.expand(4)
    assert blocks.free == 3
    grid.step(1)  # one whole block for all, an unfinished one each
    assert blocks.free == 0
    grid.step(1)
    with pytest.raises(CacheFullError, match="4 blocks"):
        grid.cache.begin(1)
    grid.reorder([[2, 2, 2, 2]])
    grid.crop(7)
    with pytest.raises(CacheFullError, match="7 blocks"):
        grid.cache.begin(3)
    grid.step(1)


@pytest.mark.parametrize("kind", ["paged", "dynamic"])
def test_newcomers_that_do_not_fit_change_nothing(model, kind):
    grid = Grid(model, [3, 2, 4], "paged", blocks=8, page=2)
    grid.step(4)
    others = [Grid(model, [2], kind, page=2) for _ in range(2)]
    for other in others:
        other.step(7)
    two = model.start([other.sources[0] for other in others], kind, page=2)
    model.step(torch.stack([other.history[0] for other in others]), two)
    rows = [list(row) for row in table(grid.cache).rows]
    with pytest.raises(CacheFullError, match=r"paged cache is full: 4 blocks"):
        grid.cache.admit([0, 1], two)  # 8 blocks, 2 of them free and 4 given back
    assert table(grid.cache).rows == rows
    grid.admit(1, others[0])
    grid.compact([0, 1])
    grid.step(1)


def test_two_caches_at_once_on_one_pool(model):
    blocks = BlockPool(page=2)
    first, second = (Grid(model, sources, "paged", pool=blocks) for sources in ([3, 2], [4, 1, 2]))
    first.step(3)
    second.step(2)
    first.expand(2)
    second.expand(3)
    for _ in range(4):
        first.step(1)
        second.step(2)
        first.reorder([[1, 0], [1, 1]])
        second.reorder([[1, 0, 2], [2, 2, 1], [0, 0, 0]])
    assert table(first.cache) is not table(second.cache)
    ours, theirs = ({block for row in table(grid.cache).rows for block in row} for grid in (first, second))
    assert not ours & theirs and len(ours | theirs) == blocks.blocks - blocks.free
    with pytest.raises(UnsupportedCacheOperation, match="'paged' cannot be moved or converted while others hold"):
        first.cache.to(dtype=torch.float32)
    del second
    first.step(1)
    first.cache.to(dtype=torch.float32)


def test_two_searches_at_once_on_one_pool():
    engine, config = EagerEngine(tiny_model64()), DecodeConfig(beam_size=4, n_best=4)
    spec = CacheSpec(kind="paged", beams=4, page=2).pooled()
    drivers = [Driver(config, starter(engine, each), room=2) for each in (spec, spec, CacheSpec(beams=4))]
    found: list[dict[int, Any]] = [{} for _ in drivers]
    for driver in drivers:
        for source, sentence in zip(SOURCES, of_model(LIMITS), strict=True):
            driver.add(sentence, source)
    while any(driver.busy for driver in drivers):
        for driver, mine in zip(drivers, found, strict=True):
            mine |= {event.number: event.result for event in driver.step() if event.result} if driver.busy else {}
    for mine in found[:2]:
        assert mine.keys() == found[2].keys()
        for number, hypotheses in mine.items():
            assert [each.tokens for each in hypotheses] == [each.tokens for each in found[2][number]]
            assert [each.score for each in hypotheses] == pytest.approx([each.score for each in found[2][number]])


# -- beginnings that were decoded before ------------------------------------------------------------------------------


def test_a_prefix_is_found_where_it_was_decoded_before(model):
    blocks = BlockPool(page=4)
    grid = Grid(model, [5], "paged", pool=blocks)
    prefix = model.ids(1, 11)
    grid.step(ids=prefix)
    assert remember(grid.cache, 0, prefix[0].tolist(), ABOUT) == 8
    source = grid.sources[0]
    del grid
    assert blocks.blocks - blocks.free == 2  # what the index holds

    other = Grid(model, [5, 3], "paged", beams=3, pool=blocks)
    other.sources[0] = source
    other.cache = model.start(other.sources, "paged", beams=3, pool=blocks)
    assert recall(other.cache, 0, prefix[0].tolist(), b"another source") == 0
    assert recall(other.cache, 0, model.ids(9).tolist(), ABOUT) == 0
    assert recall(other.cache, 0, prefix[0, :7].tolist(), ABOUT) == 4
    other.cache.crop(0)
    assert recall(other.cache, 0, prefix[0].tolist(), ABOUT) == 8
    assert other.cache.lengths.tolist() == [8, 8, 8, 0, 0, 0]
    assert other.cache.states[0].count == (2, 6)
    other.history[:3] = [prefix[0, :8]] * 3
    other.step(3)
    other.reorder([[1, 1, 0], [0, 2, 1]])
    other.step(1)
    other.crop([6, 3, 8, 4, 4, 0])  # into the blocks that the index holds
    other.step(3)
    again = model.start([source], "paged", pool=blocks)
    assert recall(again, 0, prefix[0].tolist(), ABOUT) == 8  # nobody wrote there
    hidden = model.step(prefix[:, 8:], again)
    assert (hidden[0] - model.oracle(prefix[0], source)[8:]).abs().max() < 1e-10


def test_what_a_prefix_cannot_be_given_to(model):
    grid = Grid(model, [5], "paged", page=2)
    grid.step(3)
    with pytest.raises(ValueError, match="row 0 holds 3 tokens, not 4"):
        remember(grid.cache, 0, [1, 2, 3, 4], ABOUT)
    with pytest.raises(ValueError, match="sentence 0 isn't empty"):
        recall(grid.cache, 0, [1, 2], ABOUT)
    with pytest.raises(UnsupportedCacheOperation, match="'dynamic' cannot share the blocks of a prefix"):
        recall(model.start(grid.sources, "dynamic"), 0, [1, 2], ABOUT)


def test_prefixes_go_when_blocks_are_needed_the_oldest_and_longest_first(model):
    blocks = BlockPool(blocks=6, page=2)
    old, new = model.ids(2, 4).tolist()
    for tokens in (old, new):
        grid = Grid(model, [3], "paged", pool=blocks)
        grid.step(ids=torch.tensor([tokens]))
        remember(grid.cache, 0, tokens, ABOUT)
        del grid
    assert blocks.free == 2
    grid = Grid(model, [3], "paged", pool=blocks)
    grid.step(5)
    assert blocks.free == 0 and len(blocks.prefixes) == 3
    root = pool.PrefixIndex.root(repr(table(grid.cache).keys).encode(), ABOUT)
    assert [len(blocks.recall(tokens, root)) for tokens in (old, new)] == [1, 2]
    grid.step(5)
    assert [len(blocks.recall(tokens, root)) for tokens in (old, new)] == [0, 1]
    with pytest.raises(CacheFullError):
        grid.cache.begin(4)
    assert len(blocks.prefixes) == 1  # nothing goes for a step that can't be made
    grid.step(2)
    assert len(blocks.prefixes) == 0


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_blocks_and_the_table(model):
    page, width = 4, D * 8
    grid = Grid(model, [3, 2], "paged", page=page)
    assert grid.cache.states[0].nbytes == 2 * 2 * page * width  # one block a row, K and V
    grid.step(5)
    states = grid.cache.states
    assert [state.nbytes for state in states] == [2 * 4 * page * width + 8 * 4, 2 * 4 * page * width]
    assert states[0].pool.block_bytes == LAYERS * 2 * page * width
    assert grid.cache.nbytes == sum(state.nbytes for state in states) + sum(part.nbytes for part in grid.cache.sources)


def test_the_number_of_blocks_comes_from_the_memory_there_is(model, monkeypatch):
    blocks = BlockPool(page=2)
    grid = Grid(model, [3], "paged", pool=blocks)
    monkeypatch.setattr(pool, "available_memory", lambda device: 2 * 3 * blocks.block_bytes + 1)
    grid.step(2)
    assert blocks.blocks == 1
    grid.step(2)
    grid.step(4)
    assert blocks.blocks == 4
    grid.step(5)
    assert blocks.blocks == 7  # not 8: half of what is free is for three
    monkeypatch.setattr(pool, "available_memory", lambda device: 2 * blocks.block_bytes - 1)
    grid.step(1)
    with pytest.raises(CacheFullError, match="1 blocks of 2 tokens are needed, and 0 of 7 are free"):
        grid.cache.begin(1)


def test_memory_of_this_machine_is_asked_for():
    there = pool.available_memory(torch.device("cpu"))
    assert 2**20 < there < 2**50


@pytest.mark.parametrize("options", [{"page": 0}, {"blocks": 0}])
def test_impossible_sizes_are_refused(model, options: dict[str, int]):
    with pytest.raises(ValueError, match="must be at least 1"):
        model.start(model.sources(3), "paged", **options)
    with pytest.raises(ValueError, match="impossible"):
        BlockPool(**{"page": 1, "blocks": 1, **options})


def test_layers_that_are_not_alike_have_buffers_of_their_own():
    """An ensemble's members may use one pool: a block is one number in all of them."""
    blocks = BlockPool(page=2)
    spec = CacheSpec(kind="paged", pool=blocks)
    wide, narrow = (PagedCache(spec, 1, 2, width, dtype=FP64, value_width=3) for width in (4, 8))
    assert wide.k.shape == (1, 2, 2, 4) and narrow.k.shape == (1, 2, 2, 8)
    assert wide.v.shape == narrow.v.shape == (1, 2, 2, 3)
    assert isinstance(wide.k, Tensor) and len(blocks.layers) == 2
