"""Known models as lists of layers, each of a kind that keeps something, or nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from translator.diagnostics.memory.layers import Compressed, Kept, KeysAndValues, Latent, Nothing, Windowed
from translator.errors import UserError

Layers = tuple[tuple[int, Kept], ...]


@dataclass(frozen=True)
class Rule:
    """One way to count a model's layers: how many there are of each kind, and what is said of it."""

    layers: Layers
    says: str = ""

    def growth(self, itemsize: int) -> Fraction:
        """Bytes that a token adds before any window is full."""
        return sum((count * kept.growth for count, kept in self.layers), start=Fraction(0)) * itemsize

    def nbytes(self, length: int, itemsize: int) -> int:
        """Bytes of one sequence of `length` tokens."""
        return sum(count * kept.numbers(length) for count, kept in self.layers) * itemsize


@dataclass(frozen=True)
class Preset:
    """A model by its sizes.

    `rules` are ways to count, the first of which gives bytes a token; `lengths` are shown, the last one is its full
    context; `weights` in bytes, None where they aren't known here; `without` is what it would keep without what saves.
    """

    rules: tuple[Rule, ...]
    lengths: tuple[int, ...]
    query_heads: int
    itemsize: int = 2
    weights: int | None = None
    without: Rule | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def layers(self) -> int:
        """L."""
        return sum(count for count, _ in self.rules[0].layers)


def _same(count: int, kept: Kept, says: str = "") -> Rule:
    return Rule(((count, kept),), says)


_LIGHT, _HEAVY, _WINDOW, _WIDTH = (21, 4), (20, 128), 128, 512


def _flash(window: Kept) -> Layers:
    return (2, window), *((count, Compressed(_WIDTH, rate)) for count, rate in (_LIGHT, _HEAVY))


PRESETS: dict[str, Preset] = {
    "llama2-7b": Preset(
        (_same(32, KeysAndValues(32, 128, query_heads=32)),), (4096,), query_heads=32, weights=13_400_000_000
    ),
    "llama2-70b": Preset((_same(80, KeysAndValues(8, 128, query_heads=64)),), (4096, 131_072), query_heads=64),
    "qwen3.5-moe": Preset(
        (Rule(((10, KeysAndValues(2, 256, query_heads=16)), (30, Nothing("linear, not counted")))),),
        (262_144,),
        query_heads=16,
        notes=("30 layers keep a state of a fixed size, which is the same at any length and not counted here",),
    ),
    "deepseek-v3": Preset(
        (_same(61, Latent(512, 64)),),
        (131_072,),
        query_heads=128,
        without=_same(61, KeysAndValues(128, 192, 128, query_heads=128), "with K and V of every head"),
    ),
    "deepseek-v4-flash": Preset(
        (
            Rule(_flash(Compressed(_WIDTH, 1)), "windows charged in full, as the source text does"),
            Rule(_flash(Windowed(Compressed(_WIDTH, 1), _WINDOW)), f"windows hold W - 1 = {_WINDOW - 1} tokens"),
        ),
        (1_048_576,),
        query_heads=64,
        without=_same(43, Compressed(_WIDTH, 1), "without compression"),
        notes=(
            f"Σ 1/r is 2 + 21/4 + 20/128 = {float(2 + Fraction(21, 4) + Fraction(20, 128)):.3f}, which the source text "
            "gives as 7.36",
            f"entries alone: the other 41 layers' own windows of W - 1 would add {41 * 127 * _WIDTH * 2:,} bytes; "
            "indexer keys, gates and what waits for its window are not counted",
        ),
    ),
}
"""Models of the project's source text, by name."""


def memory_preset(name: str) -> Preset:
    """The preset of that name; raises `UserError` for an unknown one."""
    if name not in PRESETS:
        raise UserError(f"--preset {name!r}: unknown model; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def kinds(layers: Iterable[tuple[int, Kept]]) -> str:
    """`2 × window, 21 × …`: how many layers there are of each kind."""
    return ", ".join(f"{count} × {kept.kind}" for count, kept in layers)
