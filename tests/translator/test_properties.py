"""Properties, on whatever hypothesis draws: searches against brute force, a cache's life against recomputation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translator.search.models import (
    BOS,
    EOS,
    NEVER,
    PAD,
    assert_same,
    beam_by_hand,
    brute_force,
    random_table,
    run,
)
from tests.translator.test_cache import FP64, KINDS, D, Grid, H, Model, assert_zero_beyond_lengths
from translator.config import DecodeConfig

pytestmark = pytest.mark.numeric

# The same examples in every run and on every machine, however slow it is.
STABLE = settings(derandomize=True, deadline=None, database=None)
limits = st.lists(st.integers(1, 4), min_size=1, max_size=3)
seeds = st.integers(100, 2**20)
spreads = st.sampled_from([0.3, 1.0, 3.0])
penalties = st.sampled_from([0.0, 0.6, 1.0, 2.0])


@settings(STABLE, max_examples=40)
@given(seed=seeds, spread=spreads, limits=limits, alpha=penalties, early=st.booleans())
def test_a_beam_wide_enough_finds_all_that_brute_force_finds(seed, spread, limits, alpha, early):
    table = random_table(seed, spread)
    config = DecodeConfig(beam_size=130, n_best=125, length_penalty=alpha, early_stopping=early)
    for sentence, found in enumerate(run(table, config, limits)):
        assert_same(found, brute_force(table, sentence, limits[sentence], alpha)[:125])


@settings(STABLE, max_examples=150)
@given(
    seed=seeds, spread=spreads, limits=limits, alpha=penalties, early=st.booleans(), beams=st.integers(2, 6),
    data=st.data(),
)  # fmt: skip
def test_any_beam_keeps_to_its_rule(seed, spread, limits, alpha, early, beams, data):
    table, n_best = random_table(seed, spread), data.draw(st.integers(1, beams))
    config = DecodeConfig(beam_size=beams, n_best=n_best, length_penalty=alpha, early_stopping=early)
    for sentence, found in enumerate(run(table, config, limits)):
        assert_same(found, beam_by_hand(table, sentence, limits[sentence], config))


@settings(STABLE, max_examples=150)
@given(seed=seeds, spread=spreads, limits=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_greedy_takes_the_best_token_until_the_end_or_the_limit(seed, spread, limits):
    table = random_table(seed, spread)
    for sentence, (found,) in enumerate(run(table, DecodeConfig(beam_size=1), limits)):
        expected: list[int] = []
        while EOS not in expected and len(expected) < limits[sentence]:
            allowed = list(table(sentence, tuple(expected)))
            allowed[PAD] = allowed[BOS] = NEVER
            expected.append(allowed.index(max(allowed)))
        assert found.tokens == expected and found.finished == (expected[-1] == EOS)


OPERATIONS = ("step", "abandon", "expand", "reorder", "compact", "admit", "crop", "reset", "reset to others")


@pytest.mark.parametrize("kind", KINDS)
@settings(STABLE, max_examples=40)
@given(data=st.data())
def test_whatever_happens_to_a_cache_every_row_decodes_as_if_alone(kind, data):
    """`Grid` recomputes every row from its first token with PyTorch's decoder at every step."""
    model = Model()
    sizes = st.integers(1, 5)
    grid = Grid(model, data.draw(st.lists(sizes, min_size=1, max_size=3)), kind, beams=data.draw(st.integers(1, 3)))
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=10)):
        happen(operation, grid, data)
        grid.step(data.draw(st.integers(1, 3)))


def happen(operation: str, grid: Grid, data: st.DataObject) -> None:
    """One operation on the cache and on the record beside it, where it can be done."""
    model, cache = grid.model, grid.cache
    B, K = cache.batch_size, cache.beams
    lengths = [len(history) for history in grid.history]
    match operation:
        case "abandon":
            T = data.draw(st.integers(1, 4))
            nan = torch.full((cache.rows, H, T, D // H), float("nan"), dtype=FP64)
            cache.begin(T).layers[0].update(nan, nan)
            cache.rollback()
            assert_zero_beyond_lengths(cache)
        case "expand" if K == 1:
            grid.expand(data.draw(st.integers(1, 3)))
        case "reorder":
            grid.reorder([data.draw(st.lists(st.integers(0, K - 1), min_size=K, max_size=K)) for _ in range(B)])
        case "compact":
            kept = data.draw(st.permutations(range(B)))[: data.draw(st.integers(1, B))]
            grid.compact(list(kept))
        case "admit":
            waiting = Grid(model, [data.draw(st.integers(1, 8))], grid.kind)
            if already := data.draw(st.integers(0, 4)):
                waiting.step(already)
            grid.admit(data.draw(st.integers(0, B - 1)), waiting)
        case "crop":
            grid.crop([data.draw(st.integers(0, length)) for length in lengths])
        case "reset" | "reset to others":
            if operation == "reset":
                cache.reset()
            else:
                others = Grid(model, data.draw(st.lists(st.integers(1, 6), min_size=B, max_size=B)), grid.kind)
                cache.reset(others.cache)
                grid.sources = others.sources
            grid.history = [history[:0] for history in grid.history]
            grid.check()
