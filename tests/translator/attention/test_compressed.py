"""Compressed attention: entries come when their window is full, the newest tokens go, and the indexer chooses."""

import pytest
import torch

from tests.translator.attention.grid import FP64, HEADS, LAYERS, TOLERANCE, D, Grid, decoder_of
from translator.attention import CompressedAttention, compressed
from translator.attention.compressed import CompressedOptions
from translator.attention.folding import fold
from translator.cache import CacheFullError, CompressedState, UnsupportedCacheOperation
from translator.config import parse
from translator.errors import UserError

WIDTH = D // HEADS
LIGHT = {"rate": 2, "top_k": 2, "window": 3, "index_heads": 2, "index_width": 4}
HEAVY = {"rate": 4, "top_k": 0, "window": 5}
both = pytest.mark.parametrize("options", [LIGHT, HEAVY], ids=["light", "heavy"])


def decoder(options, **changes):
    return decoder_of(CompressedAttention, **{**options, **changes})


def states(grid: Grid) -> list[CompressedState]:
    assert all(isinstance(state, CompressedState) for state in grid.cache.states)
    return grid.cache.states


@both
@pytest.mark.parametrize("sizes", [[1] * 11, [3, 1, 7]], ids=str)
def test_an_entry_comes_with_the_last_token_of_its_window(options, sizes):
    grid, rate, held = Grid(decoder(options), [3, 5], "dynamic"), options["rate"], 0
    for T in sizes:
        grid.step(T)
        held += T
        for state in states(grid):
            made = (state.entries != 0).any(dim=2)
            assert made.tolist() == [[slot < held // rate for slot in range(made.shape[1])]] * 2
            waiting = (state.current["partial"] != 0).flatten(2).any(dim=2)
            assert waiting.tolist() == [[place < held % rate for place in range(rate - 1)]] * 2
            window = (state.current["window"] != 0).any(dim=2).sum(dim=1)
            assert window.tolist() == [min(held, options["window"] - 1)] * 2
    assert held // rate >= 2 and held > options["window"]


@both
def test_the_account_of_a_state_is_exact(options):
    """Entries with their index keys, the window, values and gates of an unfinished entry, series a of the last."""
    grid, rate = Grid(decoder(options), [3, 5], "dynamic", capacity=8), options["rate"]
    entry, series = (WIDTH + 4, 2) if options["top_k"] else (WIDTH, 1)
    overlap = rate * 2 * entry if series == 2 else 0
    fixed = (options["window"] - 1) * WIDTH + (rate - 1) * 2 * series * entry + overlap
    for T, slots in ((1, 8 // rate), (7, 8 // rate), (rate, 16 // rate), (20, 32 // rate)):
        grid.step(T)
        assert [state.nbytes for state in states(grid)] == [2 * (fixed + slots * entry) * 8] * LAYERS
    grid.expand(3)
    assert [state.nbytes for state in states(grid)] == [6 * (fixed + 32 // rate * entry) * 8] * LAYERS


@pytest.mark.numeric
def test_what_left_the_window_is_seen_through_its_entry_alone():
    def reached(rate: int) -> list[bool]:
        made = decoder_of(CompressedAttention, rate=rate, top_k=0, window=3).stack[0].self_attn
        x = torch.randn(1, 14, D, dtype=FP64, generator=torch.Generator().manual_seed(0))
        changed = x.clone()
        changed[:, 2] += 1
        return ((made.reference(changed) - made.reference(x)).abs().amax(dim=(0, 2)) > 1e-9).tolist()

    assert reached(64) == [False, False, True, True, True] + [False] * 9  # no entry is ever full
    assert reached(4) == [False, False] + [True] * 12  # from the fourth token on
    assert reached(10) == [False, False, True, True, True] + [False] * 4 + [True] * 5


@pytest.mark.numeric
def test_an_entry_of_a_light_rate_reaches_into_the_window_before():
    numbers = torch.Generator().manual_seed(1)
    for series, touched in ((2, [1, 2]), (1, [1])):
        tokens = torch.randn(1, 8, 2, series, 3, dtype=FP64, generator=numbers)
        partial = torch.zeros(1, 1, 2, series, 3, dtype=FP64)
        previous = torch.zeros(1, 2, 2, 3, dtype=FP64) if series == 2 else None
        changed = tokens.clone()
        changed[:, 3] += 1  # in window 1 of 0, 1, 2, 3
        before, after = (fold(each, partial, previous, torch.tensor([0]), 2).entries for each in (tokens, changed))
        assert (before != after).any(dim=2)[0, :4].nonzero().flatten().tolist() == touched
        assert bool((before[0, :4] != 0).all())
    # The first has no window before it, not one of zeros.
    alone = fold(tokens[:, :2], partial, None, torch.tensor([0]), 2).entries[0, 0]
    weights = tokens[0, :2, 1, 0].softmax(0)
    assert (alone - (weights * tokens[0, :2, 0, 0]).sum(0)).abs().max() < 1e-12


def test_the_indexer_really_chooses(monkeypatch):
    """Of many entries each token sees `top_k`, its own choice, in every layer and in steps as in one pass."""
    made, chosen = decoder(LIGHT), []
    original = compressed.best
    monkeypatch.setattr(compressed, "best", lambda *given: (chosen.append(original(*given)), chosen[-1])[1])
    grid = Grid(made, [3, 5], "dynamic")
    grid.step(13)
    grid.step(1)
    assert len(chosen) == 2 * LAYERS
    for scores in chosen:
        first, T = (0, 13) if scores.shape[1] == 13 else (13, 1)
        complete = (torch.arange(first, first + T) + 1) // 2
        assert scores.isfinite().sum(dim=-1).tolist() == [complete.clamp(max=2).tolist()] * 2
    last = [scores[:, -1].isfinite() for scores in chosen]
    assert not torch.equal(last[0][0], last[0][1])  # each row chooses by itself
    assert any(bool((mask[:, :-2]).any()) for mask in last)  # and not simply the newest


@pytest.mark.numeric
def test_what_the_indexer_leaves_out_is_not_seen():
    x = torch.randn(2, 17, D, dtype=FP64, generator=torch.Generator().manual_seed(0))
    attentions = [decoder(LIGHT, top_k=count).stack[0].self_attn for count in (2, 8)]
    few, all_ = (attention.reference(x) for attention in attentions)
    assert (few[:, :5] - all_[:, :5]).abs().max() < TOLERANCE  # two entries at most are complete
    assert bool(((few[:, 7:] - all_[:, 7:]).abs().amax(dim=2) > 1e-6).any())


def test_the_indexer_learns():
    torch.manual_seed(0)
    made = decoder(LIGHT).requires_grad_(True)
    x, memory = torch.randn(2, 12, D, dtype=FP64), torch.randn(2, 3, D, dtype=FP64)
    made(x, memory, tgt_is_causal=True).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@both
def test_a_window_of_one_token_holds_none(options):
    grid = Grid(decoder(options, window=1), [3, 5], "dynamic", beams=2)
    for T in (1, 1, 3, 1, 6, 1):
        grid.step(T)
        grid.reorder(torch.tensor([[1, 0], [0, 0]]))
    assert states(grid)[0].current["window"].shape == (4, 0, WIDTH)


@both
def test_entries_of_a_step_that_never_happened_are_gone(options):
    grid = Grid(decoder(options), [3, 5], "dynamic", beams=3)
    grid.step(5)
    before = [state.entries.clone() for state in states(grid)]
    grid.fail(9, 0, taken_back=True)
    for state, held in zip(states(grid), before, strict=True):
        assert torch.equal(state.entries[:, : held.shape[1]], held) and not state.entries[:, held.shape[1] :].any()
    newcomer, empty = Grid(grid.decoder, [2], "dynamic"), Grid(grid.decoder, [2], "dynamic")
    newcomer.step(10)
    grid.admit(0, newcomer)
    grid.fail(9, 1, taken_back=False)
    grid.step(4)
    grid.admit(0, empty)
    for state in states(grid):
        made = (state.entries != 0).any(dim=2).sum(dim=1)
        assert made.tolist() == [0] * 3 + [9 // options["rate"]] * 3
    grid.step(4)


@both
def test_a_capacity_that_must_be_kept_to_is(options):
    grid = Grid(decoder(options), [3], "static", capacity=10)
    grid.step(9)
    with pytest.raises(CacheFullError, match="compressed cache is full: 11 tokens are needed and capacity is 10"):
        grid.decoder(grid.random(1, 2, D), grid.cache)
    grid.step(1)
    assert all(state.entries.shape[1] == 10 // options["rate"] for state in states(grid))


@both
def test_what_cannot_be_done_is_named(options):
    grid = Grid(decoder(options), [3], "dynamic")
    grid.step(9)
    with pytest.raises(UnsupportedCacheOperation, match="'compressed' cannot crop: its rows can be emptied"):
        grid.cache.crop(8)
    with pytest.raises(UnsupportedCacheOperation, match="'compressed' cannot keep its addresses"):
        grid.cache.prefix(1)
    assert issubclass(UnsupportedCacheOperation, UserError)  # so that a command says it in one line
    with pytest.raises(ValueError, match="takes no mask of a caller"):
        grid.decoder(grid.random(1, 1, D), grid.cache, tgt_mask=torch.zeros(1, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal and takes no mask"):
        grid.decoder(grid.random(1, 4, D), grid.random(1, 3, D))
    grid.step(3)


def test_options_are_checked():
    assert parse(CompressedOptions, {"rate": 128, "top_k": 0}, where="layer").window == 32
    with pytest.raises(UserError, match="rate = 1"):
        parse(CompressedOptions, {"rate": 1}, where="layer")
    with pytest.raises(UserError, match="unknown key 'topk'; did you mean 'top_k'"):
        parse(CompressedOptions, {"topk": 1}, where="layer")
    with pytest.raises(ValueError, match="must be a positive multiple"):
        CompressedAttention(10, 4)
