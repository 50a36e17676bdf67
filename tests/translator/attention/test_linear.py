"""Linear attention: a state of constant size, and a rule that is the same token by token and in chunks."""

import pytest
import torch

from tests.translator.attention.grid import FP64, HEADS, LAYERS, TOLERANCE, D, Grid, decoder_of
from translator.attention import LinearAttention, delta_rule
from translator.attention.linear import LinearOptions
from translator.config import parse
from translator.errors import UserError

WIDTH = D // HEADS


def decoder(convolution: int = 3):
    return decoder_of(LinearAttention, convolution=convolution)


@pytest.mark.parametrize("kind", ["dynamic", "indirect", "static"])
@pytest.mark.parametrize("convolution", [2, 4])
def test_what_is_kept_doesnt_grow(kind, convolution):
    grid = Grid(decoder(convolution), [3, 5], kind)
    sizes = []
    for T in (1, 30, 9):
        grid.step(T)
        sizes.append([state.nbytes for state in grid.cache.states])
    row = HEADS * WIDTH * WIDTH + (convolution - 1) * 3 * D
    assert sizes == [[2 * row * 8] * LAYERS] * 3


def test_the_memory_is_kept_in_fp32_where_the_model_is_narrower():
    made = decoder().to(torch.bfloat16)
    cache = made.start(torch.randn(1, 3, D, dtype=torch.bfloat16))
    made(torch.randn(1, 4, D, dtype=torch.bfloat16), cache)
    assert {part.dtype for part in cache.states[0].current.values()} == {torch.float32}


@pytest.mark.numeric
@pytest.mark.parametrize("T", [1, 5, 64, 65, 200])
def test_chunks_are_the_rule_token_by_token(T, monkeypatch):
    """With strong fading and key after key alike, where a memory has most to correct."""
    numbers = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, 3, T, 6, dtype=FP64, generator=numbers) for _ in range(3))
    k = torch.nn.functional.normalize(k + 2, dim=-1)
    log_alpha = -torch.rand(2, 3, T, dtype=FP64, generator=numbers).pow(4) * 30
    beta, S = torch.rand(2, 3, T, dtype=FP64, generator=numbers), torch.randn(2, 3, 6, 6, dtype=FP64, generator=numbers)
    read, last = delta_rule.delta_rule(q, k, v, log_alpha, beta, S)
    for t in range(T):
        S = S * log_alpha[:, :, t].exp()[..., None, None]
        lacking = v[:, :, t] - torch.einsum("rhkv,rhk->rhv", S, k[:, :, t])
        S = S + torch.einsum("rhk,rhv->rhkv", k[:, :, t], beta[:, :, t].unsqueeze(-1) * lacking)
        expected = torch.einsum("rhkv,rhk->rhv", S, q[:, :, t])
        assert (read[:, :, t] - expected).abs().max() < TOLERANCE
    assert (last - S).abs().max() < TOLERANCE
    monkeypatch.setattr(delta_rule, "CHUNK", 7)
    again, _ = delta_rule.delta_rule(q, k, v, log_alpha, beta, S * 0)
    first, _ = delta_rule.delta_rule(q[:, :, :3], k[:, :, :3], v[:, :, :3], log_alpha[:, :, :3], beta[:, :, :3], S * 0)
    assert (again[:, :, :3] - first).abs().max() < TOLERANCE


def test_a_key_written_twice_is_corrected_and_not_added_up():
    """What sets the delta rule apart: the second value takes the first one's place."""
    key = torch.tensor([0.6, 0.8], dtype=FP64).view(1, 1, 1, 2).expand(1, 1, 2, 2)
    values = torch.tensor([[3.0, 1.0], [-2.0, 5.0]], dtype=FP64).view(1, 1, 2, 2)
    ones = torch.ones(1, 1, 2, dtype=FP64)
    read, _ = delta_rule.delta_rule(key, key, values, 0 * ones, ones, torch.zeros(1, 1, 2, 2, dtype=FP64))
    assert torch.allclose(read, values)


@pytest.mark.numeric
def test_the_convolution_reaches_as_far_as_it_says():
    """A query sees its own token's neighbours: with the memory cut off, `convolution` tokens and no more."""
    made = decoder(4)
    attention = made.stack[0].self_attn
    attention.fading.fill_(20.0)  # forgets everything at once
    x = torch.randn(1, 12, D, dtype=FP64)
    changed = x.clone()
    changed[:, 3] += 1
    differs = (attention.reference(changed) - attention.reference(x)).abs().amax(dim=(0, 2)) > 1e-9
    assert differs.tolist() == [False] * 3 + [True] * 4 + [False] * 5


def test_masks_of_a_callers_are_refused_not_ignored():
    made = decoder()
    x, memory = torch.randn(1, 4, D, dtype=FP64), torch.randn(1, 3, D, dtype=FP64)
    hidden = torch.zeros(4, 4, dtype=torch.bool).fill_diagonal_(False)
    with pytest.raises(ValueError, match="causal and takes no mask"):
        made(x, memory, tgt_mask=hidden)
    with pytest.raises(ValueError, match="causal and takes no mask"):
        made(x, memory)
    cache = made.start(memory)
    with pytest.raises(ValueError, match="takes no mask of a caller"):
        made(x, cache, tgt_mask=hidden)
    assert cache.length == 0
    assert (made(x, cache) - made(x, memory, tgt_is_causal=True)).abs().max() < TOLERANCE


def test_options_are_checked():
    with pytest.raises(UserError, match="convolution = 1"):
        parse(LinearOptions, {"convolution": 1}, where="layer")
    with pytest.raises(ValueError, match="must be a positive multiple"):
        LinearAttention(10, 4)
