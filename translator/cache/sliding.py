"""Containers of a window: the last tokens alone, for layers that attend to all of them. Another function, and labelled.

A model trained with full attention reads further back than its window; without those keys it computes something else:
what a whole pass under a banded mask computes. Layers whose own attention is a window keep one by themselves
(`WindowState`), exactly, in whatever kind of cache.
"""

from typing import ClassVar

import torch
from torch import Tensor

from translator.attention.band import Band
from translator.cache.dense import normal_tensors
from translator.cache.spec import CacheSpec, register
from translator.cache.step import Step, View
from translator.cache.window import LastPositions, WindowState


@register
class SlidingCache(WindowState):
    """K and V `(rows, H_kv, slots, D_head)` of the last `window - 1` tokens; fewer slots until there are so many.

    With `past` every token is kept, though no more are shown, so that a crop may go back past the window.
    """

    kind = "sliding"
    loses = "it forgets what lies further back than its window"
    options: ClassVar[tuple[str, ...]] = ("window", "past")
    full = False
    """Whether all slots are there from the start."""

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
        assert spec.window is not None  # checked by the spec
        dtype, device = dtype or torch.get_default_dtype(), device or torch.device("cpu")
        super().__init__(rows, heads, width, band=Band(spec.window), dtype=dtype, device=device)
        self.past = bool(spec.past)
        if not self.full:
            with normal_tensors():
                self.k, self.v = (part[:, :, :0].clone() for part in (self.k, self.v))

    @classmethod
    def check_spec(cls, spec: CacheSpec) -> None:
        """Raises `ValueError` without a window."""
        if spec.window is None:
            raise ValueError(f"cache kind {cls.kind!r} needs a window: how many tokens a step sees, its own included")

    @property
    def held(self) -> int:
        """Slots of a row."""
        return self.k.shape[2]

    @property
    def visible(self) -> int:
        """Slots that a step is shown before its own tokens."""
        return min(self.held, self.band.size - 1)

    @classmethod
    def account(
        cls, spec: CacheSpec, rows: int, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype
    ) -> int:
        """See `KeyValueState.account`."""
        assert spec.window is not None
        slots = spec.window - 1
        if spec.past or not cls.full:
            slots = length if spec.past else min(length, slots)
        return rows * heads * slots * sum(widths) * dtype.itemsize

    @classmethod
    def account_read(cls, spec: CacheSpec, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype) -> int:
        """See `KeyValueState.account_read`."""
        assert spec.window is not None
        return heads * min(length, spec.window - 1) * sum(widths) * dtype.itemsize

    def begin(self, step: Step) -> View:
        """The slots of the window and the step's own tokens."""
        super().begin(step)
        return View(self.visible + step.T, self.band.size, LastPositions(self.visible))

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`."""
        k, v = super().shown(view)
        return k[:, :, k.shape[2] - view.visible :], v[:, :, v.shape[2] - view.visible :]

    def commit(self, step: Step) -> None:
        """The last tokens are held now; with `past` all of them."""
        assert self._next is not None  # the cache has seen that every layer was updated
        self.lengths = step.lengths.advanced(step.T)
        slots = self.lengths.longest if self.past else min(self.lengths.longest, self.band.size - 1)
        with normal_tensors():
            self.k, self.v = (part[:, :, part.shape[2] - slots :].clone() for part in self._next)
        self._next = None

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """See `LayerState.write`; the newest tokens stand at the end, so that zeros come before."""
        contents = dict(contents)
        if {"k", "v"} <= contents.keys() and contents["k"].shape[3:] == self.k.shape[3:]:
            slots = max(self.held, contents["k"].shape[2])
            with normal_tensors():
                self.k, self.v = _led(self.k, slots), _led(self.v, slots)
                contents["k"], contents["v"] = _led(contents["k"], slots), _led(contents["v"], slots)
        super().write(rows, contents, length)


@register
class StaticSlidingCache(SlidingCache):
    """The same, allocated once and written in place: K and V keep their addresses between steps."""

    kind = "sliding_static"
    options = ("window",)
    full = True

    def commit(self, step: Step) -> None:
        """The last tokens are written over those that were held."""
        assert self._next is not None  # the cache has seen that every layer was updated
        for old, new in zip((self.k, self.v), self._next, strict=True):
            old.copy_(new[:, :, new.shape[2] - self.held :])
        self._next = None
        self.lengths = step.lengths.advanced(step.T)


def _led(part: Tensor, slots: int) -> Tensor:
    """`part` `(rows, H, n, …)` with zeros before up to `slots`."""
    if part.shape[2] == slots:
        return part
    return torch.cat([part.new_zeros(*part.shape[:2], slots - part.shape[2], part.shape[3]), part], dim=2)
