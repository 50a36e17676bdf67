"""A decoder of one structure, and a grid of rows whose every step is set beside the structure's reference."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from translator import CachedDecoder, CachedDecoderLayer
from translator.attention import Structure
from translator.cache import DecoderCache, UnsupportedCacheOperation, WindowState
from translator.diagnostics.subject import independent_decoder

D, HEADS, LAYERS, LONGEST = 16, 2, 2, 64
FP64 = torch.float64
TOLERANCE = 1e-10


Made = type[Structure] | Callable[..., Structure]


def decoder_of(structure: Made | Sequence[Made], seed: int = 0, **options: Any) -> CachedDecoder:
    """Two layers of large random weights, or one for each of several; `options` are those of the structure."""
    stack = structure if isinstance(structure, Sequence) else [with_options(structure, options)] * LAYERS
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layers = [
            CachedDecoderLayer(D, HEADS, 24, dropout=0.0, batch_first=True, norm_first=True, structure=made, dtype=FP64)
            for made in stack
        ]
        decoder = CachedDecoder(layers)
        for name, parameter in decoder.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.5)
    return decoder.eval().requires_grad_(False)


def with_options(structure: Made, options: dict[str, Any]) -> Made:
    return functools.partial(structure, options=structure.options(**options)) if options else structure


class Grid:
    """A cache beside a record of what each row was given; the oracle sees each row alone, its source unpadded."""

    def __init__(self, decoder: CachedDecoder, sources: list[int], kind: str, seed: int = 0, **options: Any) -> None:
        self.decoder = decoder
        self.oracle = independent_decoder(decoder)
        assert self.oracle is not None
        self.numbers = torch.Generator().manual_seed(seed)
        self.sources = [self.random(length, D) for length in sources]
        memory = torch.full((len(sources), max(sources), D), 77.0, dtype=FP64)
        padding = torch.ones(len(sources), max(sources), dtype=torch.bool)
        for row, source in enumerate(self.sources):
            memory[row, : len(source)], padding[row, : len(source)] = source, False
        self.cache: DecoderCache = decoder.start(memory, padding, kind=kind, **{"capacity": LONGEST, **options})
        self.rows = [torch.zeros(0, D, dtype=FP64) for _ in range(self.cache.rows)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.numbers, dtype=FP64)

    def step(self, T: int = 1) -> None:
        x = self.random(self.cache.rows, T, D)
        output = self.decoder(x, self.cache)
        assert self.cache.lengths.tolist() == [len(row) + T for row in self.rows]
        for index, row in enumerate(self.rows):
            self.rows[index] = torch.cat([row, x[index]])
            source = self.sources[index // self.cache.beams]
            expected = self.oracle(self.rows[index][None], source[None])[0, -T:].detach()
            assert output[index].isfinite().all()
            assert (output[index] - expected).abs().max() <= TOLERANCE * max(1, float(expected.abs().max()))

    def fail(self, T: int, layer: int, taken_back: bool) -> None:
        """A step of NaN that raises behind the self-attention of `layer`."""
        broken = self.decoder.layers[layer].linear1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broken, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.decoder(torch.full((self.cache.rows, T, D), float("nan"), dtype=FP64), self.cache)
        if taken_back:
            self.cache.rollback()

    def expand(self, beams: int) -> None:
        self.cache.expand(beams)
        self.rows = [row for row in self.rows for _ in range(beams)]

    def reorder(self, beam: Tensor) -> None:
        self.cache.reorder(beam)
        K = self.cache.beams
        self.rows = [self.rows[b * K + k] for b, row in enumerate(beam.tolist()) for k in row]

    def compact(self, keep: list[int]) -> None:
        K = self.cache.beams
        self.cache.compact(torch.tensor(keep))
        self.rows = [self.rows[b * K + k] for b in keep for k in range(K)]
        self.sources = [self.sources[b] for b in keep]

    def admit(self, slot: int, other: "Grid") -> None:
        self.cache.admit(slot, other.cache)
        K = self.cache.beams
        self.rows[slot * K : (slot + 1) * K] = other.rows * (K // other.cache.beams)
        self.sources[slot] = other.sources[0]

    def crop(self, lengths: list[int]) -> None:
        self.cache.crop(torch.tensor(lengths))
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    def reset(self) -> None:
        self.cache.reset()
        self.rows = [row[:0] for row in self.rows]


def crop_if_all_is_there(grid: Grid, shorter: list[int]) -> None:
    """A crop of rows of which some may have lost tokens; then it is refused, and nothing changes."""
    held = min(state.held for state in grid.cache.states if isinstance(state, WindowState))
    lost = [held < len(row) > length > 0 for row, length in zip(grid.rows, shorter, strict=True)]
    if not any(lost):
        grid.crop(shorter)
        return
    with pytest.raises(UnsupportedCacheOperation, match=f"cannot crop: of a row only the last {held} tokens are held"):
        grid.crop(shorter)


def live(grid: Grid, chance: random.Random, kind: str, events: int, *, crops: bool | None) -> None:
    """Anything that may happen to a grid; where rows can't be `crops`ped, that is refused by name and nothing changes
    (None: where tokens have left for good).

    Rows become unequal by sentences that are admitted with another number of tokens.
    """
    operations = [
        "step",
        "step",
        "fail",
        "expand",
        "reorder",
        "compact",
        "admit",
        "admit",
        "crop",
        "reset",
        "inference",
    ]
    for _ in range(events):
        B, K, operation = grid.cache.batch_size, grid.cache.beams, chance.choice(operations)
        if max(map(len, grid.rows)) > LONGEST - 8:
            operation = "reset"
        match operation:
            case "step":
                grid.step(chance.randint(1, 7))
            case "inference":
                with torch.inference_mode():
                    grid.step(1)
                    grid.step(chance.randint(1, 3))
            case "fail":
                grid.fail(chance.randint(1, 5), chance.randrange(LAYERS), chance.random() < 0.5)
            case "expand" if K == 1:
                grid.expand(chance.choice([1, 3]))
            case "reorder":
                for _ in range(chance.randint(1, 4)):
                    grid.reorder(torch.randint(K, (B, K), generator=grid.numbers))
                    grid.step(1)
            case "compact":
                grid.compact(chance.sample(range(B), chance.randint(max(1, B - 1), B)))
            case "admit":
                other = Grid(
                    grid.decoder, [chance.randint(1, 5)], kind, chance.randrange(1000), beams=chance.choice([1, K])
                )
                for _ in range(chance.randint(0, 3)):
                    other.step(chance.randint(1, 5))
                grid.admit(chance.randrange(B), other)
            case "crop":
                shorter = [chance.randint(0, len(row)) for row in grid.rows]
                if crops is None:
                    crop_if_all_is_there(grid, shorter)
                elif crops or not any(shorter):
                    grid.crop(shorter)
                else:
                    with pytest.raises(UnsupportedCacheOperation, match="cannot crop"):
                        grid.crop(shorter)
            case "reset":
                grid.reset()
    grid.step(1)
    grid.step(6)
