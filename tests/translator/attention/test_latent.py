"""Latent attention: what is kept, in which containers, and that one token reads latents as they are."""

import pytest
import torch

from tests.translator.attention.grid import FP64, HEADS, TOLERANCE, D, Grid, decoder_of
from translator.attention import LatentAttention
from translator.attention import latent as module
from translator.attention.latent import LatentOptions
from translator.attention.rotary import rotated
from translator.cache import CACHE_KINDS, DynamicCache, UnsupportedCacheOperation
from translator.config import parse
from translator.errors import UserError

RANK, ROTARY = 6, 4


def decoder(**options):
    return decoder_of(LatentAttention, kv_rank=RANK, rotary_width=ROTARY, **options)


@pytest.mark.parametrize("kind", ["dynamic", "indirect", "static"])
def test_a_token_costs_a_latent_and_one_rotary_key(kind):
    grid = Grid(decoder(), [3, 5], kind, capacity=20)
    for state in grid.cache.states:
        assert state.k.shape == (2, 1, 20, RANK) and state.v.shape == (2, 1, 20, ROTARY)
        table = state.table.nbytes if kind == "indirect" and state.owns_table else 0
        assert state.nbytes - table == 2 * 20 * (RANK + ROTARY) * 8  # no factor 2, no heads
    grid.step(4)
    assert all(bool((state.k[:, :, :4] != 0).all()) for state in grid.cache.states)


@pytest.mark.numeric
def test_what_is_kept_is_not_expanded_and_is_rotated_once():
    grid = Grid(decoder(), [3], "dynamic")
    grid.step(3)
    grid.step(1)
    attention = grid.decoder.stack[0].self_attn
    x = grid.decoder.stack[0].norm1(grid.rows[0][None])
    latent, key = attention.down(x).split([RANK, ROTARY], dim=-1)
    state = grid.cache.states[0]
    assert (state.k[0, 0, :4] - attention.latent_norm(latent)[0]).abs().max() < TOLERANCE
    assert (state.v[0, 0, :4] - rotated(key[:, None], torch.arange(4)[None])[0, 0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("absorbed", [True, False])
def test_one_token_reads_the_latents_as_they_are(absorbed, monkeypatch):
    """The cost of a step doesn't hold the expansion of everything that went before."""
    made = decoder(absorbed=absorbed)
    grid = Grid(made, [3], "dynamic")
    grid.step(9)
    widths = []
    original = made.stack[0].self_attn.up.forward
    monkeypatch.setattr(made.stack[0].self_attn.up, "forward", lambda x: (widths.append(x.shape[1]), original(x))[1])
    made(grid.random(1, 1, D), grid.cache)
    made(grid.random(1, 2, D), grid.cache)
    assert widths == ([12] if absorbed else [10, 12])


@pytest.mark.numeric
def test_a_mask_for_each_head_is_kept_to():
    made = decoder()
    x, memory = torch.randn(1, 5, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    hidden = torch.zeros(HEADS, 5, 5, dtype=torch.bool)
    hidden[1, 4, 1] = True
    hidden |= torch.ones(5, 5, dtype=torch.bool).triu(1)
    whole = made(x, memory, tgt_mask=hidden)
    cache = made.start(memory)
    steps = [made(x[:, t : t + 1], cache, tgt_mask=hidden[:, t : t + 1, : t + 1]) for t in range(5)]
    assert (torch.cat(steps, dim=1) - whole).abs().max() < TOLERANCE
    assert (whole - made(x, memory, tgt_is_causal=True)).abs().max() > 1e-3


def test_a_container_of_one_width_says_so(monkeypatch):
    class Even(DynamicCache):
        kind = "even"
        uneven = False

    monkeypatch.setitem(CACHE_KINDS, "even", Even)
    with pytest.raises(UnsupportedCacheOperation, match="'even' cannot hold keys 6 wide beside values 4 wide"):
        decoder().start(torch.randn(1, 3, D, dtype=FP64), kind="even")


def test_the_rotation_depends_on_the_distance_alone():
    a, b = torch.randn(2, 1, 1, 1, 8, dtype=FP64)
    products = [
        float((rotated(a, torch.tensor([[t]])) * rotated(b, torch.tensor([[t + 3]]))).sum()) for t in (0, 5, 40)
    ]
    assert products == pytest.approx([products[0]] * 3, abs=1e-12)
    assert products[0] != pytest.approx(float((a * b).sum()), abs=1e-3)
    there = rotated(a, torch.tensor([[7]]))
    assert (rotated(there, torch.tensor([[7]]), back=True) - a).abs().max() < 1e-12


def test_options_are_checked():
    with pytest.raises(UserError, match="must be even"):
        parse(LatentOptions, {"rotary_width": 3}, where="layer")
    with pytest.raises(UserError, match="unknown key 'kv_rang'; did you mean 'kv_rank'"):
        parse(LatentOptions, {"kv_rang": 3}, where="layer")
    with pytest.raises(ValueError, match="must be a positive multiple"):
        LatentAttention(10, 4)
    assert module.LatentAttention.options is LatentOptions
