"""Layers that keep nothing: those that read another's keys and values, and those without self-attention."""

import copy
import functools

import pytest
import torch

from tests.translator.attention.grid import FP64, TOLERANCE, D, Grid, decoder_of
from translator import CachedDecoder
from translator.attention import (
    CachedMultiheadAttention,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    NoAttention,
    SharedAttention,
    Structure,
    WindowAttention,
)
from translator.attention.grouped import GroupedOptions
from translator.attention.window import WindowOptions
from translator.errors import UserError

Multihead, Shared, Empty = CachedMultiheadAttention, SharedAttention, NoAttention
Turned = functools.partial(GroupedAttention, options=GroupedOptions(kv_heads=1, rotary=True))
Window = functools.partial(WindowAttention, options=WindowOptions(window=3))


def owners(decoder: CachedDecoder) -> list[int | None]:
    return [each.owner if isinstance(each, SharedAttention) else None for each in decoder.structures]


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([Multihead, Shared, Shared], [None, 0, 0]),
        ([Multihead, Turned, Shared, Empty, Shared], [None, None, 1, None, 1]),
        ([Window, LinearAttention, Shared], [None, None, 0]),
    ],
)
def test_the_nearest_earlier_layer_with_its_own_is_read(stack, expected):
    assert owners(decoder_of(stack)) == expected


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ([Shared], "decoder layer 0 has no earlier layer whose keys and values it could share"),
        ([Empty, LinearAttention, Shared], "decoder layer 2 has no earlier layer"),
        (
            [Multihead, LatentAttention, Shared],
            "layer 2 can't share what layer 1 keeps: LatentAttention has no keys",
        ),
    ],
)
def test_a_layer_with_nothing_to_share_is_refused(stack, message):
    with pytest.raises(UserError, match=message):
        decoder_of(stack)


def test_alone_it_says_that_it_stands_in_a_stack():
    layer = SharedAttention(D, 2, dtype=FP64)
    with pytest.raises(RuntimeError, match="stands in a stack"):
        _ = layer.origin


@pytest.mark.parametrize("kind", ["dynamic", "static", "indirect"])
def test_what_is_shared_or_empty_costs_nothing(kind):
    grid = Grid(decoder_of([Multihead, Shared, Empty, Shared]), [3, 5], kind, capacity=20)
    grid.step(3)
    assert [state.kind for state in grid.cache.states] == [kind, "shared", "none", "shared"]
    assert [state.nbytes for state in grid.cache.states[1:]] == [0, 0, 0]
    assert grid.cache.nbytes == grid.cache.states[0].nbytes + sum(source.nbytes for source in grid.cache.sources)


@pytest.mark.numeric
def test_queries_are_turned_as_the_keys_they_meet():
    """A token moved to another place is seen from elsewhere by the sharing layer too."""
    decoder = decoder_of([Turned, Shared])
    x, memory = torch.randn(1, 6, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    whole = decoder(x, memory, tgt_is_causal=True)
    plain = decoder_of([functools.partial(GroupedAttention, options=GroupedOptions(kv_heads=1)), Shared])
    plain.load_state_dict(decoder.state_dict())
    assert (plain(x, memory, tgt_is_causal=True) - whole).abs().max() > 1e-3
    grid = Grid(decoder, [3], "dynamic")
    grid.step(4)
    grid.step(1)


@pytest.mark.numeric
def test_what_a_shared_layer_wants_of_its_keys_is_learned_where_they_are_made():
    decoder = decoder_of([Multihead, Shared]).requires_grad_(True)
    x, memory = torch.randn(1, 6, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    made = decoder.stack[0].self_attn
    grads = []
    for share in (True, False):
        decoder.zero_grad()
        hidden = decoder(x, memory, tgt_is_causal=True)
        if not share:  # what the first layer gives on its own
            hidden = CachedDecoder([decoder.stack[0]])(x, memory, tgt_is_causal=True)
        hidden.sum().backward()
        grads.append(made.in_proj_weight.grad[D:].clone())
    assert (grads[0] - grads[1]).abs().max() > 1e-3


@pytest.mark.numeric
def test_a_copy_shares_within_itself():
    decoder = decoder_of([Multihead, Shared])
    twin = copy.deepcopy(decoder)
    assert twin.structures[1].origin is twin.structures[0]
    assert len(list(twin.parameters())) == len(list(decoder.parameters()))  # what is read isn't registered twice
    with torch.no_grad():
        twin.structures[0].in_proj_weight.mul_(2)
    x, memory = torch.randn(1, 4, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    assert (twin(x, memory, tgt_is_causal=True) - decoder(x, memory, tgt_is_causal=True)).abs().max() > TOLERANCE


@pytest.mark.numeric
@pytest.mark.parametrize("norm_first", [True, False])
def test_without_attention_a_layer_is_the_rest_of_it(norm_first):
    decoder = decoder_of([Empty])
    layer = decoder.stack[0]
    layer.norm_first = norm_first
    assert list(layer.self_attn.parameters()) == [] and layer.self_attn.products() == {}
    x, memory = torch.randn(2, 5, D, dtype=FP64), torch.randn(2, 3, D, dtype=FP64)
    whole = decoder(x, memory, tgt_is_causal=True)
    one = torch.cat([decoder(part, memory, tgt_is_causal=True) for part in x.split(1, dim=1)], dim=1)
    assert (whole - one).abs().max() < TOLERANCE  # no token sees another
    assert isinstance(layer.self_attn, Structure)
