"""The contract of what one layer keeps between steps, and the part of it that holds K and V."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from translator.attention.kernels import Kernel
from translator.cache.lengths import Lengths
from translator.cache.spec import CacheSpec
from translator.cache.step import Step, View
from translator.errors import UserError


class CacheFullError(RuntimeError):
    """A step would need more slots than the container was given."""


class UnsupportedCacheOperation(UserError, NotImplementedError):
    """The state cannot do what was asked; the message names both.

    A mistake that a user can mend: another kind of cache, engine or structure can.
    """


class LayerState(ABC):
    """What one layer keeps of the tokens of each row. Made by the layer's structure, driven by the `DecoderCache`.

    Lengths live in the `DecoderCache`, not here: layers are written one after another, so a length per layer would be
    ambiguous in the middle of a forward pass. A step calls `begin` on every state, then each layer writes its share,
    then `commit` or `rollback` reaches every state. An operation that a state can't do raises and names both.
    """

    kind: str
    needs_write: ClassVar[bool] = True
    """Whether a step in which this layer wrote nothing is a mistake."""

    @abstractmethod
    def begin(self, step: Step) -> View:
        """Makes room for `step.T` more tokens in every row and says which slots the step sees.

        Nothing written before may change. Raises `CacheFullError` when there is no room.
        """

    def again(self, lengths: Lengths) -> None:
        """Makes ready for one token more in every row, as `begin` and `in_place` did for the one before."""
        raise self.cannot("be written by kernels")

    def commit(self, step: Step) -> None:  # noqa: B027 - most states have nothing to do
        """The step counts: states that keep old and new apart swap here."""

    def rollback(self, step: Step) -> None:
        """The step never happened: what it wrote goes."""
        self.clear(step.lengths, step.end)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""

    # -- the life of a grid: rows are indices of the whole stack's grid ---------------------------------------------

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row `beams` times, neighbours first; `length` slots are filled in the longest."""
        raise self.cannot("expand")

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`; fewer rows than before drops the rest."""
        raise self.cannot("reorder or compact")

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """What these rows hold of their first `length` tokens, by name; each tensor's first dimension is the rows.

        `length` is the longest's; what is given of a shorter row beyond its own may be anything.
        """
        raise self.cannot("be read, which admit needs of the newcomer")

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`, as `read` gives it, whatever they held."""
        raise self.cannot("admit")

    def admit(self, rows: slice, source: LayerState, theirs: slice, length: int) -> None:
        """A sentence's `rows` become the rows `theirs` of `source` (one is repeated), who hold `length` at most."""
        contents = source.read(theirs, length)
        repeats = (rows.stop - rows.start) // max(len(next(iter(contents.values()))), 1)
        if repeats > 1:
            contents = {name: part.repeat_interleave(repeats, dim=0) for name, part in contents.items()}
        self.write(rows, contents, length)

    def require(self, method: str, operation: str) -> None:
        """Raises `UnsupportedCacheOperation` when `method` isn't this state's own, before any layer has changed."""
        if getattr(type(self), method) is getattr(LayerState, method):
            raise self.cannot(operation)

    def check_clear(self, lengths: Lengths) -> None:
        """Raises `UnsupportedCacheOperation` when rows can't be shortened to `lengths`."""
        self.require("clear", "crop, reset or roll back a step")

    def check_admit(  # noqa: B027 - most states have room in their own rows
        self, rows: Sequence[slice], source: LayerState, lengths: Sequence[int], beams: int
    ) -> None:
        """Raises `CacheFullError` when these rows can't become the sentences of `source`, of `beams` rows each."""

    def check_room(self, length: int) -> None:  # noqa: B027 - most states can always grow
        """Raises `CacheFullError` when a row can't hold `length` tokens."""

    def clear(self, lengths: Lengths, until: int) -> None:
        """Forgets each row's tokens from its length up to `until`."""
        raise self.cannot("crop, reset or roll back a step")

    def prefix(self, rows: int) -> Self:
        """The first `rows` rows, in the same memory: what is written to one is in the other."""
        raise self.cannot("keep its addresses, which a captured step needs")

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts what is held."""
        raise self.cannot("be moved or converted")

    def cannot(self, operation: str) -> UnsupportedCacheOperation:
        """The error to raise for an operation that this state lacks."""
        return UnsupportedCacheOperation(f"cache kind {self.kind!r} cannot {operation}")


class WritingStep(Protocol):
    """What a container sees of its layer's share of a step; see `LayerStep`."""

    view: View

    @property
    def step(self) -> Step:
        """The whole stack's."""

    @property
    def mask(self) -> Tensor | None:
        """What the queries see of the view."""

    @property
    def is_causal(self) -> bool:
        """Whether that is the kernel's own causal mask."""

    def mark_written(self) -> None:
        """The layer has done its share."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends to the container and returns all of K and V."""


class KeyValueState(LayerState):
    """K and V of one layer's self-attention: what a cache container is. One row for each hypothesis.

    Slots in a view but beyond a row's length are zero, and masked: a mask alone doesn't stop NaN.
    """

    needs_capacity: ClassVar[bool] = False
    """Whether `CacheSpec.capacity` must be given."""

    loses: ClassVar[str | None] = None
    """What of keys and values isn't kept as it was, in words; None: nothing, so that results don't change."""

    options: ClassVar[tuple[str, ...]] = ()
    """Fields of `CacheSpec` that are this kind's alone."""

    uneven: ClassVar[bool] = False
    """Whether values may be of another width than keys: the constructor then takes `value_width` too."""

    by_reference: ClassVar[bool] = False
    """Whether rows are entries of a table that the layers share, and their K and V stay where they are."""

    @classmethod
    def new_pool(cls, spec: CacheSpec) -> Any:
        """What several caches may have in common, for `CacheSpec.pool`; None where each has its own memory."""
        return None

    @classmethod
    def check_spec(cls, spec: CacheSpec) -> None:
        """Raises `ValueError` where the spec lacks what this kind needs."""

    @abstractmethod
    def __init__(
        self,
        spec: CacheSpec,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Empty, for `rows` hypotheses of `heads` key heads, each `width` wide."""

    @classmethod
    def check_uneven(cls, width: int, value_width: int) -> None:
        """Raises `UnsupportedCacheOperation` where keys and values have to be of one width."""
        if not cls.uneven:
            raise UnsupportedCacheOperation(
                f"cache kind {cls.kind!r} cannot hold keys {width} wide beside values {value_width} wide"
            )

    @classmethod
    def account(
        cls, spec: CacheSpec, rows: int, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype
    ) -> int:
        """What `nbytes` will say once every row holds `length` tokens, worked out before anything is allocated.

        `widths` are those of keys and values. Raises `NotImplementedError` for a container that gives no account.
        """
        raise NotImplementedError(f"cache kind {cls.kind!r} gives no account of its bytes")

    @classmethod
    def account_shared(cls, spec: CacheSpec, rows: int, length: int) -> int:
        """Bytes that the layers of a stack have in common, and the first of them counts."""
        return 0

    @classmethod
    def account_read(cls, spec: CacheSpec, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype) -> int:
        """Bytes of one row that a step reads in one layer when `length` tokens are held: by default all of them."""
        return heads * sum(widths) * length * dtype.itemsize

    def in_place(self, step: Step, view: View) -> list[Tensor] | None:
        """Makes ready for a kernel that writes this step's K and V itself, and reads the container where it lies.

        Returns what that kernel works on, or None (the default) where this container or this view isn't for kernels.
        """
        return None

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` into the slots of `step`."""

    @abstractmethod
    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`, old and new together."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: WritingStep, kernel: Kernel, dropout: float) -> Tensor:
        """Appends `k, v`, then attends. A container that reads its own form (blocks, codes) does so here."""
        k, v = step.update(k, v)
        return kernel(q, k, v, step.mask, step.is_causal, dropout)
