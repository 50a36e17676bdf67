"""Fewer key heads, rotary positions and sinks: what is kept, what can be loaded, what is refused."""

import pytest
import torch

from tests.translator.attention.grid import FP64, HEADS, TOLERANCE, D, Grid, decoder_of
from translator.attention import CachedMultiheadAttention, FullPass, GroupedAttention, attend
from translator.attention.grouped import GroupedOptions
from translator.attention.masks import causal_mask
from translator.attention.rotary import rotated
from translator.attention.sink import SinkKernel
from translator.attention.written_out import turned_plainly
from translator.config import parse
from translator.errors import UserError
from translator.operations import EagerOperations


@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 1), (2, 2), (None, HEADS)])
def test_only_the_key_heads_are_kept(kv_heads, heads):
    grid = Grid(decoder_of(GroupedAttention, kv_heads=kv_heads), [3, 5], "static", capacity=20)
    for state in grid.cache.states:
        assert state.k.shape == state.v.shape == (2, heads, 20, D // HEADS)
    grid.step(3)


def test_its_packed_weight_is_no_multihead_attentions():
    whole = torch.nn.MultiheadAttention(12, 6, dtype=FP64)
    grouped = GroupedAttention(12, 6, options=GroupedOptions(kv_heads=2), dtype=FP64)
    assert grouped.in_proj_weight.shape == (12 + 2 * 2 * 2, 12) and grouped.in_proj_bias.shape == (20,)
    with pytest.raises(RuntimeError, match=r"in_proj_weight \(36, 12\) has a key head for each query head.*of 2 key h"):
        grouped.load_state_dict(whole.state_dict())
    GroupedAttention(12, 6, dtype=FP64).load_state_dict(whole.state_dict())  # as many: the same shape


@pytest.mark.numeric
@pytest.mark.parametrize("bias", [True, False])
def test_with_as_many_key_heads_it_is_multihead_attention(bias):
    torch.manual_seed(0)
    plain = CachedMultiheadAttention(D, HEADS, bias=bias, dtype=FP64)
    grouped = GroupedAttention(D, HEADS, bias=bias, dtype=FP64)
    grouped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, D, dtype=FP64)
    results = [each.attend(x, FullPass(7, None, True), EagerOperations(each)) for each in (plain, grouped)]
    assert (results[0] - results[1]).abs().max() < TOLERANCE


@pytest.mark.numeric
def test_each_key_head_serves_its_neighbours():
    torch.manual_seed(0)
    grouped = GroupedAttention(D, 4, options=GroupedOptions(kv_heads=2), dtype=FP64)
    whole = CachedMultiheadAttention(D, 4, dtype=FP64)
    parts = grouped.in_proj_weight.detach().split([D, 8, 8])
    repeated = [parts[0]] + [part.view(2, 4, D).repeat_interleave(2, dim=0).view(D, D) for part in parts[1:]]
    with torch.no_grad():
        whole.in_proj_weight.copy_(torch.cat(repeated))
        whole.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x = torch.randn(2, 7, D, dtype=FP64)
    results = [each.attend(x, FullPass(7, None, True), EagerOperations(each)) for each in (whole, grouped)]
    assert (results[0] - results[1]).abs().max() < TOLERANCE


# -- rotary positions -------------------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_keys_are_turned_before_they_are_kept_and_once():
    grid = Grid(decoder_of(GroupedAttention, rotary=50.0), [3], "dynamic")
    grid.step(3)
    grid.step(1)
    layer = grid.decoder.stack[0]
    k = layer.self_attn.qkv(layer.norm1(grid.rows[0][None])).chunk(3, dim=-1)[1].view(1, 4, HEADS, D // HEADS)
    held = grid.cache.states[0].k[:, :, :4]
    assert (held - turned_plainly(k, 50.0).transpose(1, 2)).abs().max() < TOLERANCE
    assert (held - k.transpose(1, 2)).abs().max() > 0.1


@pytest.mark.numeric
def test_the_base_says_how_slowly_the_last_pair_turns():
    x = torch.randn(1, 1, 9, 6, dtype=FP64)
    slow, fast = (rotated(x, torch.arange(9)[None], base=base) for base in (1e6, 10.0))
    assert (slow - fast)[..., [0, 3]].abs().max() < TOLERANCE  # the first pair turns by a radian a token
    assert (slow - fast)[..., [2, 5]].abs().max() > 0.1
    assert (turned_plainly(x.transpose(1, 2), 10.0).transpose(1, 2) - fast).abs().max() < TOLERANCE


# -- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("masked", ["causal", "bool", "float", "none"])
def test_a_sink_takes_its_share_of_the_softmax_and_gives_nothing(masked):
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=FP64) for heads in (4, 2, 2))
    visible = ~causal_mask(5, 5)
    mask = {"bool": visible, "float": torch.zeros(5, 5, dtype=FP64).masked_fill(~visible, float("-inf"))}.get(masked)
    sink = torch.tensor([0.3, -1.0, 2.0, -50.0], dtype=FP64)
    found = SinkKernel(sink)(q, k, v, mask, masked == "causal")
    plain = attend(q, k, v, mask, masked == "causal")
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
    powers = scores.exp() if masked == "none" else scores.exp() * visible
    kept = powers.sum(-1, keepdim=True) / (powers.sum(-1, keepdim=True) + sink.exp().view(4, 1, 1))
    assert (found - plain * kept).abs().max() < TOLERANCE
    assert (found[:, 3] - plain[:, 3]).abs().max() < TOLERANCE < (found[:, 2] - plain[:, 2]).abs().max()


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    mask = torch.tensor([[False] * 3, [True] * 3, [True] * 3])
    found = SinkKernel(torch.zeros(2))(q, k, v, mask)
    assert bool((found[:, :, 0] == 0).all()) and bool(found.isfinite().all())


def test_a_sink_has_no_slot_and_learns():
    grid = Grid(decoder_of(GroupedAttention, sink=True), [3], "static", capacity=20)
    assert grid.cache.states[0].k.shape[2] == 20
    attention = GroupedAttention(D, HEADS, options=GroupedOptions(sink=True))
    attention.attend(torch.randn(1, 4, D), FullPass(4, None, True), EagerOperations(attention)).sum().backward()
    assert bool((attention.sink.grad != 0).all())
    assert "sink" in attention.state_dict() and "sink" not in GroupedAttention(D, HEADS).state_dict()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_options_are_checked():
    with pytest.raises(ValueError, match="4 query heads can't share 3 key heads evenly"):
        GroupedAttention(16, 4, options=GroupedOptions(kv_heads=3))
    with pytest.raises(ValueError, match="even head width, not 3"):
        GroupedAttention(6, 2, options=GroupedOptions(rotary=True))
    with pytest.raises(UserError, match="unknown key 'kv_head'; did you mean 'kv_heads'"):
        parse(GroupedOptions, {"kv_head": 3}, where="layer")
    with pytest.raises(UserError, match="kv_heads = 0"):
        parse(GroupedOptions, {"kv_heads": 0}, where="layer")
    assert [GroupedOptions(rotary=given).rotary_base for given in (False, True, 500.0, 20)] == [None, 1e4, 500.0, 20]
