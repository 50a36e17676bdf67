"""The contract that every cache container keeps, and the step that writes to all layers as one transaction.

Shape letters: `B` sentences, `K` beams, `rows = B * K`, `T` new target tokens, `S` source tokens, `H` heads,
`D_head` head width. The rows of a sentence are neighbours: row `b * K + k`.
"""

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor


class CacheFullError(RuntimeError):
    """A step would need more slots than the container was given."""


class UnsupportedCacheOperation(NotImplementedError):
    """The container cannot do what was asked; the message names both."""


class SelfAttentionCache(ABC):
    """K and V of one layer's self-attention, one row for each hypothesis. A view shows zeros beyond a row's length.

    Lengths live in the `DecoderCache`, not here: layers are written one after another, so a length per layer would be
    ambiguous in the middle of a forward pass.
    """

    kind: str

    @abstractmethod
    def reserve(self, length: int, block: int) -> int:
        """Makes room for `length` slots in every row; returns how many a view shows: whole blocks, where they fit.

        Raises `CacheFullError` when the container can't hold `length`.
        """

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, step: "Step") -> None:
        """Writes `k, v` `(rows, H, T, D_head)` into the slots of `step`."""

    @abstractmethod
    def view(self, step: "Step") -> tuple[Tensor, Tensor]:
        """K and V `(rows, H, step.visible, D_head)`, old and new together."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts what is held."""
        raise self._cannot("be moved or converted")

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row `beams` times, neighbours first."""
        raise self._cannot("expand")

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`; fewer rows than before drops the rest."""
        raise self._cannot("reorder or compact")

    def admit(self, rows: range, source: "SelfAttentionCache", length: int) -> None:
        """Rows `rows` become the rows of `source`, whose first `length` slots are filled."""
        raise self._cannot("admit")

    def clear(self, lengths: "Lengths", until: int) -> None:
        """Zeroes each row's slots from its length up to `until`."""
        raise self._cannot("crop, reset or roll back a step")

    def _cannot(self, operation: str) -> UnsupportedCacheOperation:
        return UnsupportedCacheOperation(f"cache kind {self.kind!r} cannot {operation}")


@dataclass(slots=True)
class CrossAttentionCache:
    """K and V of the encoder output for one layer, `(B, H, S, D_head)`: complete when made, never written again.

    Held once for each sentence; its K hypotheses are query rows of one attention call.
    """

    k: Tensor
    v: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.k.nbytes + self.v.nbytes

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts K and V."""
        self.k, self.v = self.k.to(device, dtype), self.v.to(device, dtype)

    def select(self, sentences: Tensor) -> None:
        """Keeps the sentences with these indices, in this order."""
        self.k, self.v = self.k.index_select(0, sentences), self.v.index_select(0, sentences)

    def admit(self, slot: int, source: "CrossAttentionCache", source_length: int) -> None:
        """Sentence `slot` becomes the one sentence of `source`, all padded to `source_length` tokens."""
        self.k = _admit_padded(self.k, slot, source.k, source_length)
        self.v = _admit_padded(self.v, slot, source.v, source_length)


def _admit_padded(old: Tensor, slot: int, new: Tensor, length: int) -> Tensor:
    grown = old.new_zeros(*old.shape[:2], length, old.shape[3])
    grown[:, :, : old.shape[2]] = old
    grown[slot] = 0
    grown[slot, :, : new.shape[2]] = new[0]
    return grown


@dataclass(slots=True)
class LayerCache:
    """Both caches of one decoder layer, by name."""

    self_attn: SelfAttentionCache
    cross_attn: CrossAttentionCache


class Lengths:
    """How many tokens each row holds: one number while all rows agree, a tensor `(rows,)` on the host when not."""

    __slots__ = ("ragged", "rows", "uniform")

    def __init__(self, rows: int, uniform: int | None = 0, ragged: Tensor | None = None) -> None:
        self.rows = rows
        self.uniform = uniform
        self.ragged = ragged

    @classmethod
    def of(cls, values: Tensor) -> "Lengths":
        """From a tensor `(rows,)`; equal values take the fast path."""
        values = values.detach().to("cpu", torch.int64, copy=True).reshape(-1)  # the caller may write into theirs
        if not len(values) or bool((values == values[0]).all()):
            return cls(len(values), int(values[0]) if len(values) else 0)
        return cls(len(values), None, values)

    @property
    def longest(self) -> int:
        """The longest row's length."""
        return self.uniform if self.ragged is None else int(self.ragged.max())  # type: ignore[return-value]

    def tensor(self) -> Tensor:
        """`(rows,)`, int64, on the host."""
        if self.ragged is not None:
            return self.ragged
        return torch.full((self.rows,), self.uniform or 0, dtype=torch.int64)

    def advanced(self, by: int) -> "Lengths":
        """These lengths plus `by`."""
        if self.ragged is not None:
            return Lengths(self.rows, None, self.ragged + by)
        return Lengths(self.rows, (self.uniform or 0) + by)


class LayerStep:
    """One layer's share of a step: what attention sees of the cache."""

    __slots__ = ("_step", "cache", "written")

    def __init__(self, cache: LayerCache, step: "Step") -> None:
        self.cache = cache
        # Weak, since the step holds its layers: a cycle would keep K and V until the garbage collector comes round.
        self._step = weakref.ref(step)
        self.written = False

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends `k, v` `(rows, H, T, D_head)` and returns all of K and V. The one line that knows of caching."""
        step = self._step()
        if step is None or step.closed:
            raise RuntimeError("this step is over: it was committed, or another was begun or the grid changed since")
        container = self.cache.self_attn
        container.append(k, v, step)
        self.written = True
        return container.view(step)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Step:
    """A step of T tokens on the whole stack: positions, mask and slots, worked out once from the lengths.

    `mask` has `scaled_dot_product_attention`'s polarity (True = visible): None, `(T, visible)` or
    `(rows, 1, T, visible)`. `is_causal` stands for the plain triangle of a first step. `source_mask`, True = visible,
    is `(B, 1, 1, S)` or None. `closed` once committed or rolled back: nothing more is written.
    """

    T: int
    start: int | None
    slots: Tensor | None
    visible: int
    mask: Tensor | None
    is_causal: bool
    source_mask: Tensor | None
    closed: bool = False
    layers: list[LayerStep] = field(default_factory=list)


def step_mask(lengths: Lengths, T: int, visible: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """`(mask, is_causal)` for T new tokens on rows of these lengths, bottom-right aligned.

    Token `i` of row `r` stands at position `lengths[r] + i` and sees the keys at or before it.
    """
    past = lengths.uniform
    if past is not None and visible == past + T and (T == 1 or past == 0):
        return None, T > 1
    keys = torch.arange(visible, device=device)
    if past is not None:
        queries = torch.arange(past, past + T, device=device)
        return keys <= queries.unsqueeze(1), False
    queries = lengths.tensor().to(device).unsqueeze(1) + torch.arange(T, device=device)
    return (keys <= queries.unsqueeze(2)).unsqueeze(1), False
