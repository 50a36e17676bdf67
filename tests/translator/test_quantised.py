"""The container that rounds, beside a pass over whole sequences that rounds by the same schedule in its own way."""

import math
import random

import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_translator
from tests.translator.attention.grid import FP64, HEADS, D, decoder_of
from translator import CachedDecoder
from translator.attention import CachedMultiheadAttention
from translator.cache import CacheSpec, DecoderCache, QuantisedCache, UnsupportedCacheOperation, cache_options
from translator.cache.codes import decode, encode
from translator.errors import UserError

pytestmark = pytest.mark.numeric
WIDTH = D // HEADS


# -- the oracle: no cache, no codes, one number after another --------------------------------------------------------


def rounded(numbers: list[float], bits: int) -> list[float]:
    low, step = min(numbers), (max(numbers) - min(numbers)) / (2**bits - 1)
    return [low + step * round((x - low) / step) if step else x for x in numbers]


def rounded_rows(x: Tensor, by_token: bool, group: int, bits: int) -> Tensor:
    """`x` `(tokens, D_head)`: whole groups of tokens rounded, channel by channel or token by token."""
    out = x.tolist()
    for first in range(0, len(x) - group + 1, group):
        tokens = range(first, first + group)
        for token in tokens if by_token else ():
            width = min(group, x.shape[1])
            parts = [rounded(out[token][start : start + width], bits) for start in range(0, x.shape[1], width)]
            out[token] = [number for part in parts for number in part]
        for channel in () if by_token else range(x.shape[1]):
            column = rounded([out[token][channel] for token in tokens], bits)
            for token, number in zip(tokens, column, strict=True):
                out[token][channel] = number
    return torch.tensor(out, dtype=x.dtype).view_as(x)


class Oracle:
    """Decoder layers written out; `coded` says how many tokens before each were codes when its step began."""

    def __init__(self, decoder: CachedDecoder, spec: CacheSpec) -> None:
        self.decoder, self.spec = decoder, spec

    def due(self, length: int) -> int:
        """Tokens that have to be codes once `length` were committed."""
        return max(0, (length - self.spec.residual) // self.spec.group * self.spec.group)

    def self_attention(self, layer: torch.nn.Module, x: Tensor, coded: list[int]) -> Tensor:
        attention, group, bits = layer.self_attn, self.spec.group, self.spec.bits
        q, k, v = (x @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, -1)
        heads = []
        for head in range(HEADS):
            part = slice(head * WIDTH, (head + 1) * WIDTH)
            lossy = rounded_rows(k[:, part], False, group, bits), rounded_rows(v[:, part], True, group, bits)
            found = []
            for t, old in enumerate(coded):
                keys, values = (
                    torch.cat([rough[:old], exact[old : t + 1, part]])
                    for rough, exact in zip(lossy, (k, v), strict=True)
                )
                found.append((keys @ q[t, part] / math.sqrt(WIDTH)).softmax(0) @ values)
            heads.append(torch.stack(found))
        return torch.cat(heads, -1) @ attention.out_proj.weight.T + attention.out_proj.bias

    def __call__(self, x: Tensor, source: Tensor, coded: list[int]) -> Tensor:
        for layer in self.decoder.layers:
            x = x + self.self_attention(layer, layer.norm1(x), coded)
            cross = torch.nn.MultiheadAttention(D, HEADS, batch_first=True, dtype=FP64)
            cross.load_state_dict(layer.multihead_attn.state_dict())
            x = x + cross(layer.norm2(x)[None], source[None], source[None], need_weights=False)[0][0]
            x = x + layer.linear2(layer.linear1(layer.norm3(x)).relu())
        return x


class Rows:
    """A cache beside what each row was given, how much of it is codes, and how much was when each step began."""

    def __init__(self, decoder: CachedDecoder, B: int, seed: int, **options: int) -> None:
        self.decoder, self.numbers = decoder, torch.Generator().manual_seed(seed)
        self.sources = [self.random(5, D) for _ in range(B)]
        self.cache: DecoderCache = decoder.start(torch.stack(self.sources), kind="quantised", **options)
        self.oracle = Oracle(decoder, self.cache.spec)
        self.tokens = [torch.zeros(0, D, dtype=FP64) for _ in range(B)]
        self.before: list[list[int]] = [[] for _ in range(B)]
        self.codes = [0] * B

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.numbers, dtype=FP64)

    def step(self, T: int) -> None:
        x = self.random(len(self.tokens), T, D)
        output = self.decoder(x, self.cache)
        for row, mine in enumerate(self.tokens):
            self.before[row] += [self.codes[row]] * T
            self.tokens[row] = torch.cat([mine, x[row]])
            source = self.sources[row // self.cache.beams]
            expected = self.oracle(self.tokens[row], source, self.before[row])[-T:]
            torch.testing.assert_close(output[row], expected, rtol=1e-9, atol=1e-10)
            self.codes[row] = max(self.codes[row], self.oracle.due(len(self.tokens[row])))
        assert self.codes == self.coded

    def select(self, rows: list[int]) -> None:
        self.tokens, self.codes = [self.tokens[row] for row in rows], [self.codes[row] for row in rows]
        self.before = [list(self.before[row]) for row in rows]

    @property
    def coded(self) -> list[int]:
        state = self.cache.states[0]
        return (state.groups.tensor() * state.group).tolist()


@pytest.fixture(scope="module")
def decoder() -> CachedDecoder:
    return decoder_of(CachedMultiheadAttention)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("residual", [0, 3])
def test_steps_are_the_pass_that_rounds_by_the_same_schedule(decoder: CachedDecoder, bits: int, residual: int) -> None:
    rows = Rows(decoder, 2, bits, bits=bits, group=4, residual=residual)
    for T in (1, 1, 1, 1, 1, 5, 1, 2, 9, 1, 1):
        rows.step(T)
    assert rows.coded == [(24 - residual) // 4 * 4] * 2  # it rounded, and more than once


def test_a_random_life_gives_what_the_oracle_gives(decoder: CachedDecoder) -> None:
    pushed = 0
    for seed in range(20):
        chance = random.Random(seed)
        rows = Rows(decoder, 3, seed, bits=chance.choice([4, 8]), group=4, residual=chance.choice([0, 2, 5]))
        for _ in range(14):
            live(rows, chance, decoder, seed)
        pushed += max(rows.coded)
    assert pushed > 60


def live(rows: Rows, chance: random.Random, decoder: CachedDecoder, seed: int) -> None:
    cache, K = rows.cache, rows.cache.beams
    match chance.choice(["step", "step", "step", "beams", "compact", "admit", "crop", "abandon", "empty"]):
        case "beams" if K == 1:
            cache.expand(2)
            rows.select([row for row in range(cache.batch_size) for _ in range(2)])
        case "beams":
            beam = torch.tensor([[chance.randrange(K) for _ in range(K)] for _ in range(cache.batch_size)])
            cache.reorder(beam)
            rows.select([b * K + int(k) for b, mine in enumerate(beam) for k in mine])
        case "compact" if cache.batch_size > 1:
            kept = chance.sample(range(cache.batch_size), cache.batch_size - 1)
            cache.compact(torch.tensor(kept))
            rows.sources = [rows.sources[b] for b in kept]
            rows.select([b * K + k for b in kept for k in range(K)])
        case "admit":
            options = {name: getattr(cache.spec, name) for name in ("bits", "group", "residual")}
            other = Rows(decoder, 1, seed + chance.randrange(99), **options)
            for _ in range(chance.randint(0, 3)):
                other.step(chance.randint(1, 7))
            slot = chance.randrange(cache.batch_size)
            cache.admit(slot, other.cache)
            rows.sources[slot] = other.sources[0]
            for k in range(K):
                rows.tokens[slot * K + k], rows.before[slot * K + k] = other.tokens[0], list(other.before[0])
                rows.codes[slot * K + k] = other.codes[0]
        case "crop":
            lengths = [chance.randint(coded, len(mine)) for coded, mine in zip(rows.coded, rows.tokens, strict=True)]
            cache.crop(torch.tensor(lengths))
            for row, length in enumerate(lengths):
                rows.tokens[row], rows.before[row] = rows.tokens[row][:length], rows.before[row][:length]
                rows.codes[row] *= length > 0
        case "empty":
            cache.reset()
            rows.tokens, rows.before = [mine[:0] for mine in rows.tokens], [[] for _ in rows.tokens]
            rows.codes = [0] * len(rows.tokens)
        case "abandon":
            nan = torch.full((cache.rows, HEADS, 2, WIDTH), float("nan"), dtype=FP64)
            cache.begin(2).layers[0].update(nan, nan)
        case _:
            rows.step(chance.choice([1, 1, 2, 6]))


def test_after_a_crop_rounding_goes_on_by_what_was_rounded_before(decoder: CachedDecoder) -> None:
    rows = Rows(decoder, 1, 0, bits=8, group=4, residual=1)
    rows.step(9)
    assert rows.coded == [8]
    with pytest.raises(UnsupportedCacheOperation, match="'quantised' cannot crop into tokens that are codes"):
        rows.cache.crop(7)
    rows.cache.crop(8)
    assert rows.cache.states[0].groups.uniform == 2


def test_a_row_of_numbers_that_are_none_leaves_no_trace_once_it_is_emptied(decoder: CachedDecoder) -> None:
    rows = Rows(decoder, 2, 0, bits=4, group=4, residual=0)
    with torch.no_grad():
        decoder(torch.full((2, 9, D), float("nan"), dtype=FP64), rows.cache)
    rows.cache.reset()
    rows.step(3)
    rows.step(6)


def test_bytes_are_those_of_codes_scales_and_exact_tokens(decoder: CachedDecoder) -> None:
    rows = Rows(decoder, 2, 0, bits=2, group=8, residual=4)
    rows.step(29)  # 24 tokens are codes, 5 are exact
    assert rows.coded == [24, 24]
    lanes = 2 * HEADS
    codes = 2 * lanes * 24 * WIDTH * 2 // 8
    scales = 2 * lanes * 3 * WIDTH * 8 + 2 * lanes * 24 * (WIDTH // 8) * 8  # and lowest values, of K and of V
    assert rows.cache.states[0].nbytes == codes + scales + 2 * lanes * 5 * WIDTH * 8
    assert rows.cache.states[0].nbytes == QuantisedCache.account(rows.cache.spec, 2, HEADS, (WIDTH, WIDTH), 29, FP64)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_code_is_within_half_a_step_and_the_ends_are_exact(bits: int) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0), dtype=FP64)
    x[0, 0] = 7.0  # all alike
    codes, scale, low = encode(x, bits)
    assert codes.shape == (5, 3, 16 * bits // 8) and codes.dtype == torch.uint8
    back = decode(codes, scale, low, bits)
    assert bool(((back - x).abs() <= scale.unsqueeze(-1) / 2 + 1e-12).all())
    torch.testing.assert_close(back.amax(-1), x.amax(-1))
    torch.testing.assert_close(back.amin(-1), x.amin(-1))


def test_what_it_cannot_hold_is_refused_by_name(decoder: CachedDecoder) -> None:
    with pytest.raises(UnsupportedCacheOperation, match="'quantised' cannot hold values 8 wide in groups of 6"):
        decoder.start(torch.zeros(1, 3, D, dtype=FP64), kind="quantised", group=6)
    with pytest.raises(ValueError, match="bits 3: codes have 2, 4, 8 bits"):
        CacheSpec(kind="quantised", bits=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantised,bit=8", "kind 'quantised' knows bits, group, residual, not 'bit'"),
        ("quantised,bits=eight", "bits = 'eight' is not a whole number"),
        ("quantised,bits=5", "--cache quantised,bits=5: bits 5: codes have 2, 4, 8 bits"),
        ("dynamic,bits=4", "kind 'dynamic' takes no options, not 'bits'"),
        ("quantized", "unknown cache kind 'quantized'; known: dynamic, .*approximate: .*quantised"),
    ],
)
def test_a_slip_in_what_is_asked_of_a_kind_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cache_options(text)


def test_a_translator_decodes_with_it() -> None:
    translator = tiny_translator(cache="quantised,bits=8,group=4,residual=0")
    assert translator.translate(["the cat sat", ""], beam_size=3)[1] == ""
