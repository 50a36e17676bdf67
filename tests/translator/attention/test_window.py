"""Windows and chunks: what is cut off, what is kept, and what can't be taken back."""

import pytest
import torch

from tests.translator.attention.grid import FP64, HEADS, TOLERANCE, D, Grid, decoder_of
from translator import CachedDecoder
from translator.attention import Band, CachedMultiheadAttention, ChunkedAttention, WindowAttention, kernels
from translator.attention.masks import view_mask
from translator.cache import UnsupportedCacheOperation, WindowState

KINDS = {"window": WindowAttention, "chunked": ChunkedAttention}
every_kind = pytest.mark.parametrize("kind", KINDS)


def one_layer(kind: str, window: int) -> CachedDecoder:
    return CachedDecoder([decoder_of(KINDS[kind], window=window).stack[0]]).eval()


# The first position that the query at each position sees, with a window of 4.
FIRST = {"window": [0, 0, 0, 0, 1, 2, 3, 4, 5], "chunked": [0, 0, 0, 0, 4, 4, 4, 4, 8]}


@every_kind
def test_what_a_band_shows(kind):
    band = Band(4, kind == "chunked")
    assert [max(0, band.first(t)) for t in range(9)] == FIRST[kind]
    expected = torch.tensor([[first <= s <= t for s in range(9)] for t, first in enumerate(FIRST[kind])])
    assert torch.equal(band.mask(9, torch.device("cpu")), expected)
    assert band.mask(4, torch.device("cpu")) is None
    limits = {"window": None, "chunk": 4} if kind == "chunked" else {"window": 4}
    assert torch.equal(view_mask(0, 9, 9, torch.device("cpu"), **limits)[0], expected)
    assert torch.equal(view_mask(6, 3, 9, torch.device("cpu"), **limits)[0], expected[6:])
    ragged = view_mask(torch.tensor([6, 2]), 1, 9, torch.device("cpu"), **limits)[0]
    assert torch.equal(ragged[:, 0, 0], expected[[6, 2]])


@pytest.mark.numeric
@every_kind
def test_what_lies_outside_changes_nothing_and_what_lies_inside_does(kind):
    decoder = one_layer(kind, 4)
    memory, x = torch.randn(1, 3, D, dtype=FP64), torch.randn(1, 9, D, dtype=FP64)
    whole = decoder(x, memory, tgt_is_causal=True)
    for position in range(9):
        changed = x.clone()
        changed[:, position] = torch.randn(D, dtype=FP64)  # a layer norm takes away what is added to all
        moved = (decoder(changed, memory, tgt_is_causal=True) - whole).abs().amax(dim=(0, 2)) > TOLERANCE
        assert moved.tolist() == [FIRST[kind][t] <= position <= t for t in range(9)]


@pytest.mark.numeric
@every_kind
@pytest.mark.parametrize("container", ["dynamic", "static", "indirect"])
def test_a_row_keeps_no_more_than_the_next_token_may_see(kind, container):
    grid = Grid(decoder_of(KINDS[kind], window=4), [3, 5], container, capacity=40)
    for state in grid.cache.states:
        assert isinstance(state, WindowState) and state.nbytes == 2 * 2 * HEADS * 3 * (D // HEADS) * 8
    before = sum(state.nbytes for state in grid.cache.states)
    held = []
    for _ in range(12):
        grid.step(1)
        held.append(grid.cache.states[0].k.clone())
    assert sum(state.nbytes for state in grid.cache.states) == before
    assert all(torch.equal(held[t][:, :, 1:], held[t + 1][:, :, :-1]) for t in range(11))  # the oldest has left
    assert not torch.equal(held[3][:, :, 0], held[4][:, :, 0])
    full = decoder_of(CachedMultiheadAttention)
    assert (grid.oracle(grid.rows[0][None], grid.sources[0][None]) - full(
        grid.rows[0][None], grid.sources[0][None], tgt_is_causal=True)).abs().max() > 1e-3  # fmt: skip


@every_kind
def test_one_token_of_equal_rows_needs_no_mask(kind, monkeypatch):
    decoder, masks = decoder_of(KINDS[kind], window=4), []
    grid = Grid(decoder, [3, 5], "dynamic")

    def seen(q, k, v, mask, is_causal=False, dropout=0.0):
        masks.append((mask is None, k.shape[2]))
        return kernels.attend(q, k, v, mask, is_causal, dropout)

    monkeypatch.setattr("translator.operations.EagerOperations.attention", staticmethod(seen))
    for t in range(9):
        masks.clear()
        grid.decoder(grid.random(2, 1, D), grid.cache)
        assert masks[0] == (True, t + 1 - FIRST[kind][t])


@pytest.mark.numeric
@every_kind
def test_a_mask_of_ones_own_hides_more(kind):
    decoder = decoder_of(KINDS[kind], window=4)
    x, memory = torch.randn(1, 9, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    hidden[5:, 5] = hidden[8, 7] = True
    hidden[5, 5] = False
    whole = decoder(x, memory, tgt_mask=hidden)
    cache = decoder.start(memory)
    steps = [decoder(x[:, a:b], cache, tgt_mask=hidden[a:b, :b]) for a, b in [(0, 1), (1, 6), (6, 7), (7, 9)]]
    assert (torch.cat(steps, dim=1) - whole).abs().max() < TOLERANCE
    assert (whole - decoder(x, memory, tgt_is_causal=True)).abs().max() > 1e-3


@pytest.mark.numeric
@every_kind
def test_rows_are_shortened_while_all_their_tokens_are_there(kind):
    grid = Grid(decoder_of(KINDS[kind], window=5), [3, 5], "dynamic")
    grid.step(4)
    grid.crop([1, 3])
    grid.step(1)
    grid.step(2)  # 4 and 6 tokens, of which 4 are held
    before = [state.k.clone() for state in grid.cache.states]
    with pytest.raises(UnsupportedCacheOperation, match="'window' cannot crop: of a row only the last 4 tokens"):
        grid.cache.crop(torch.tensor([4, 5]))
    assert all(torch.equal(state.k, old) for state, old in zip(grid.cache.states, before, strict=True))
    grid.crop([2, 6])
    grid.step(3)
    grid.crop([0, 9])
    grid.step(1)


def test_what_another_state_held_is_refused():
    state = WindowState(2, 2, 4, band=Band(3), dtype=FP64, device=torch.device("cpu"))
    with pytest.raises(UnsupportedCacheOperation, match="'window' cannot admit a state of k, v"):
        state.write(slice(0, 1), {"k": torch.zeros(1, 2, 2, 4), "v": torch.zeros(1, 2, 2, 4)}, 2)
