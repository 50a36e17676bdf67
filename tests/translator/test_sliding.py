"""Containers of a window on layers of full attention: each step is the whole pass under a banded mask."""

import random

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import tiny_translator
from tests.translator.attention.grid import FP64, HEADS, D, decoder_of
from translator import CachedDecoder
from translator.attention import CachedMultiheadAttention
from translator.cache import APPROXIMATE_KINDS, CACHE_KINDS, CacheSpec, DecoderCache, UnsupportedCacheOperation
from translator.errors import UserError

pytestmark = pytest.mark.numeric
KINDS = ["sliding", "sliding_static"]
SOURCE = 5


def banded(decoder: CachedDecoder, x: Tensor, source: Tensor, window: int) -> Tensor:
    """PyTorch's own layers over a whole sequence `(T, D)`, each query seeing `window` tokens, its own the last."""
    places = torch.arange(len(x))
    ages = places.unsqueeze(1) - places
    hidden = (ages < 0) | (ages >= window)
    x = x[None]
    for layer in decoder.layers:
        plain = nn.TransformerDecoderLayer(D, HEADS, 24, 0.0, batch_first=True, norm_first=True, dtype=FP64).eval()
        plain.load_state_dict(layer.state_dict())
        x = plain(x, source[None], tgt_mask=hidden)
    return x[0]


class Rows:
    """A cache beside what each row was given."""

    def __init__(self, decoder: CachedDecoder, B: int, seed: int, kind: str, **options: int) -> None:
        self.decoder, self.numbers = decoder, torch.Generator().manual_seed(seed)
        self.sources = [self.random(SOURCE, D) for _ in range(B)]
        self.cache: DecoderCache = decoder.start(torch.stack(self.sources), kind=kind, **options)
        self.tokens = [torch.zeros(0, D, dtype=FP64) for _ in range(B)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.numbers, dtype=FP64)

    @property
    def window(self) -> int:
        window = self.cache.spec.window
        assert window is not None
        return window

    def step(self, T: int) -> None:
        x = self.random(len(self.tokens), T, D)
        output = self.decoder(x, self.cache)
        for row, mine in enumerate(self.tokens):
            self.tokens[row] = torch.cat([mine, x[row]])
            source = self.sources[row // self.cache.beams]
            with torch.no_grad():
                expected = banded(self.decoder, self.tokens[row], source, self.window)[-T:]
            torch.testing.assert_close(output[row], expected, rtol=1e-9, atol=1e-10)


@pytest.fixture(scope="module")
def decoder() -> CachedDecoder:
    return decoder_of(CachedMultiheadAttention)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("prefill", [1, 3, 9])
def test_steps_are_the_pass_under_a_banded_mask(decoder: CachedDecoder, kind: str, window: int, prefill: int) -> None:
    rows = Rows(decoder, 2, window, kind, window=window)
    for T in (prefill, 1, 1, 1, 4, 1, 8, 1):
        rows.step(T)
    state = rows.cache.states[0]
    assert state.held == window - 1 < len(rows.tokens[0])  # it forgot
    assert state.nbytes == 2 * 2 * HEADS * (window - 1) * (D // HEADS) * 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_life_gives_what_the_band_gives(decoder: CachedDecoder, kind: str) -> None:
    forgot = 0
    for seed in range(12):
        chance = random.Random(seed)
        rows = Rows(decoder, 3, seed, kind, window=chance.choice([2, 4, 6]))
        for _ in range(14):
            live(rows, chance, decoder, kind)
        forgot += max(map(len, rows.tokens)) >= rows.window
    assert forgot > 5


def live(rows: Rows, chance: random.Random, decoder: CachedDecoder, kind: str) -> None:
    cache, K = rows.cache, rows.cache.beams
    match chance.choice(["step", "step", "step", "beams", "compact", "admit", "crop", "abandon", "empty"]):
        case "beams" if K == 1:
            cache.expand(2)
            rows.tokens = [mine for mine in rows.tokens for _ in range(2)]
        case "beams":
            beam = torch.tensor([[chance.randrange(K) for _ in range(K)] for _ in range(cache.batch_size)])
            cache.reorder(beam)
            rows.tokens = [rows.tokens[b * K + int(k)] for b, mine in enumerate(beam) for k in mine]
        case "compact" if cache.batch_size > 1:
            kept = chance.sample(range(cache.batch_size), cache.batch_size - 1)
            cache.compact(torch.tensor(kept))
            rows.sources = [rows.sources[b] for b in kept]
            rows.tokens = [rows.tokens[b * K + k] for b in kept for k in range(K)]
        case "admit":
            other = Rows(decoder, 1, chance.randrange(99), kind, window=rows.window)
            for _ in range(chance.randint(0, 3)):
                other.step(chance.randint(1, 7))
            slot = chance.randrange(cache.batch_size)
            cache.admit(slot, other.cache)
            rows.sources[slot] = other.sources[0]
            rows.tokens[slot * K : slot * K + K] = other.tokens * K
        case "crop":
            lengths = [chance.choice([0, len(mine)]) for mine in rows.tokens]
            cache.crop(torch.tensor(lengths))
            rows.tokens = [mine[:length] for mine, length in zip(rows.tokens, lengths, strict=True)]
        case "empty":
            cache.reset()
            rows.tokens = [mine[:0] for mine in rows.tokens]
        case "abandon":
            nan = torch.full((cache.rows, HEADS, 2, D // HEADS), float("nan"), dtype=FP64)
            cache.begin(2).layers[0].update(nan, nan)
        case _:
            rows.step(chance.choice([1, 1, 2, 6]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mine", "theirs"), [(5, 2), (2, 5), (1, 9)])
def test_a_newcomer_may_hold_more_or_less(decoder: CachedDecoder, kind: str, mine: int, theirs: int) -> None:
    rows, other = (Rows(decoder, B, B, kind, window=6) for B in (2, 1))
    rows.step(mine)
    other.step(theirs)
    rows.cache.admit(1, other.cache)
    rows.sources[1], rows.tokens[1] = other.sources[0], other.tokens[0]
    rows.step(1)
    rows.step(3)


def test_a_crop_past_the_window_is_refused_unless_the_past_is_kept(decoder: CachedDecoder) -> None:
    rows = Rows(decoder, 2, 0, "sliding", window=4)
    rows.step(3)
    rows.cache.crop(1)  # nothing has gone yet
    rows.tokens = [mine[:1] for mine in rows.tokens]
    rows.step(6)
    with pytest.raises(UnsupportedCacheOperation, match="'sliding' cannot crop"):
        rows.cache.crop(5)
    keeps = Rows(decoder, 2, 0, "sliding", window=4, past=1)
    keeps.step(9)
    keeps.cache.crop(torch.tensor([3, 6]))
    keeps.tokens = [keeps.tokens[0][:3], keeps.tokens[1][:6]]
    keeps.step(1)
    keeps.step(5)
    assert keeps.cache.states[0].nbytes > rows.cache.states[0].nbytes


def test_the_static_one_keeps_its_addresses(decoder: CachedDecoder) -> None:
    rows = Rows(decoder, 2, 0, "sliding_static", window=4)
    before = [(state.k.data_ptr(), state.v.data_ptr()) for state in rows.cache.states]
    for T in (2, 5, 1):
        rows.step(T)
    assert before == [(state.k.data_ptr(), state.v.data_ptr()) for state in rows.cache.states]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 9])
def test_the_account_is_to_the_byte(decoder: CachedDecoder, kind: str, length: int) -> None:
    for past in (0, 1) if kind == "sliding" else (0,):
        rows = Rows(decoder, 3, 0, kind, window=6, past=past)
        rows.step(length)
        sizes = (3, HEADS, (D // HEADS, D // HEADS), length, FP64)
        assert rows.cache.states[0].nbytes == APPROXIMATE_KINDS[kind].account(rows.cache.spec, *sizes)


def test_it_is_labelled_and_needs_a_window(decoder: CachedDecoder) -> None:
    assert "sliding" not in CACHE_KINDS
    with pytest.raises(ValueError, match="'sliding' needs a window"):
        decoder.start(torch.zeros(1, 3, D, dtype=FP64), kind="sliding")
    with pytest.raises(UserError, match="sliding: cache kind 'sliding' needs a window"):
        tiny_translator(cache="sliding")
    with pytest.raises(ValueError, match="window 0 must be at least 1"):
        CacheSpec(kind="sliding", window=0)


def test_a_translator_decodes_with_it() -> None:
    whole, same, other = (tiny_translator(cache=kind) for kind in ("dynamic", "sliding,window=999", "sliding,window=2"))
    lines = ["the cat sat on the mat", "", "a dog"]
    assert same.translate(lines, beam_size=3) == whole.translate(lines, beam_size=3)
    assert len(other.translate(lines, beam_size=3)) == 3
