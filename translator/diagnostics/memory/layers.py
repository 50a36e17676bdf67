"""What one layer keeps of a sequence, in numbers: a class for each kind of layer.

`numbers(S)` counts them for one row of S tokens, `growth` is what a token adds as long as nothing is dropped. Times the
bytes of a number and the layers of that kind they are the bytes of a cache, rooms and tables of containers apart.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction


class Kept(ABC):
    """What a layer keeps."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its name in the field."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The formula, with its sizes."""

    @property
    @abstractmethod
    def growth(self) -> Fraction:
        """Numbers that a token adds, on average, before any window is full; 0 where the size is fixed."""

    @abstractmethod
    def numbers(self, length: int) -> int:
        """Numbers held for one row of `length` tokens."""


@dataclass(frozen=True)
class KeysAndValues(Kept):
    """K and V of `heads` key heads (Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023), `width` wide."""

    heads: int
    width: int
    value_width: int | None = None
    query_heads: int | None = None

    @property
    def kind(self) -> str:
        """Multi-head, grouped-query or multi-query."""
        if self.heads == (self.query_heads or self.heads):
            return "multi-head"
        return "multi-query" if self.heads == 1 else "grouped-query"

    @property
    def rule(self) -> str:
        """2 H_kv D_head, or H_kv (D_k + D_v)."""
        if self.value_width in (None, self.width):
            return f"2 · {self.heads} · {self.width} a token"
        return f"{self.heads} · ({self.width} + {self.value_width}) a token"

    @property
    def growth(self) -> Fraction:
        """The same for every token."""
        return Fraction(self.heads * (self.width + (self.value_width or self.width)))

    def numbers(self, length: int) -> int:
        """All of them."""
        return int(self.growth) * length


@dataclass(frozen=True)
class Latent(Kept):
    """A latent and a rotary key that all heads share (DeepSeek-AI 2024, DeepSeek-V2): K and V are made when read."""

    rank: int
    rotary: int

    @property
    def kind(self) -> str:
        """Multi-head latent."""
        return "latent"

    @property
    def rule(self) -> str:
        """d_c + d_r: no factor 2."""
        return f"{self.rank} + {self.rotary} a token"

    @property
    def growth(self) -> Fraction:
        """The same for every token."""
        return Fraction(self.rank + self.rotary)

    def numbers(self, length: int) -> int:
        """All of them."""
        return (self.rank + self.rotary) * length


@dataclass(frozen=True)
class Compressed(Kept):
    """One entry for every `rate` tokens, K and V in one, `width` wide; a rate of 1 is K = V without compression."""

    width: int
    rate: int

    @property
    def kind(self) -> str:
        """K = V, compressed or not."""
        return "K = V" if self.rate == 1 else f"K = V, 1 of {self.rate}"

    @property
    def rule(self) -> str:
        """d / r: no factor 2."""
        return f"{self.width} a token" if self.rate == 1 else f"{self.width} an entry of {self.rate} tokens"

    @property
    def growth(self) -> Fraction:
        """d / r."""
        return Fraction(self.width, self.rate)

    def numbers(self, length: int) -> int:
        """Entries of whole windows; what waits for its window to fill is a structure's own affair."""
        return self.width * (length // self.rate)


@dataclass(frozen=True)
class Windowed(Kept):
    """The newest `window - 1` tokens of another kind: the new one itself is the last of its window (Beltagy et al.
    2020). Chunks are the same to a cache, and differ in the mask alone."""

    of: Kept
    window: int

    @property
    def kind(self) -> str:
        """A window over …"""
        return f"window, {self.of.kind}"

    @property
    def rule(self) -> str:
        """min(S, W - 1)."""
        return f"{self.of.rule}, {self.window - 1:,} tokens at most"

    @property
    def growth(self) -> Fraction:
        """Before it is full."""
        return self.of.growth

    def numbers(self, length: int) -> int:
        """Constant from `window - 1` on."""
        return self.of.numbers(min(length, self.window - 1))


@dataclass(frozen=True)
class Recurrent(Kept):
    """A memory matrix a head and a short convolution's inputs (linear attention: Katharopoulos et al. 2020)."""

    heads: int
    key_width: int
    value_width: int
    convolution: int
    channels: int

    @property
    def kind(self) -> str:
        """Linear."""
        return "linear"

    @property
    def rule(self) -> str:
        """H_v d_k d_v + (k - 1) d_qkv: a sequence's length doesn't matter."""
        state = f"{self.heads} · {self.key_width} · {self.value_width}"
        return f"{state} + {self.convolution - 1} · {self.channels}, whatever the length"

    @property
    def growth(self) -> Fraction:
        """None."""
        return Fraction(0)

    def numbers(self, length: int) -> int:
        """A constant."""
        return self.heads * self.key_width * self.value_width + (self.convolution - 1) * self.channels


@dataclass(frozen=True)
class Nothing(Kept):
    """A layer that keeps nothing: without attention, or reading the K and V of another layer."""

    why: str = "no attention"

    @property
    def kind(self) -> str:
        """Why there is nothing."""
        return self.why

    @property
    def rule(self) -> str:
        """0."""
        return "0"

    @property
    def growth(self) -> Fraction:
        """None."""
        return Fraction(0)

    def numbers(self, length: int) -> int:
        """None."""
        return 0


def scores_matrix(query_heads: int, length: int, itemsize: int = 4) -> int:
    """Bytes of the attention weights of one layer where a kernel stores them: `length` squared for each head."""
    return query_heads * length * length * itemsize
