"""What containers share that keep K and V in one dense buffer each."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from translator.attention.kernels import Kernel
from translator.cache.lengths import Lengths
from translator.cache.spec import CacheSpec
from translator.cache.state import KeyValueState, WritingStep
from translator.cache.step import Step, View


class DenseCache(KeyValueState):
    """K and V in two buffers `(rows, H, slots, D_head)`; subclasses decide how many slots there are.

    Invariant between steps: below `clean`, every slot at or beyond its row's length is zero. A mask alone would not be
    enough, since 0 * NaN is NaN. Slots from `clean` on hold whatever the memory held: no view has shown them yet, and
    zeroing a large buffer at once can cost as much as the first token.
    """

    first_slots = 32
    uneven = True
    kernels_may_read: ClassVar[bool] = True
    """Whether `in_place` holds: not for a subclass that appends or shows in another way, unless it says so."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kernels_may_read" not in vars(cls) and vars(cls).keys() & {"append", "shown", "begin"}:
            cls.kernels_may_read = False

    def __init__(
        self,
        spec: CacheSpec,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        value_width: int | None = None,
    ) -> None:
        shape = (rows, heads, spec.capacity or self.first_slots)
        # Normal tensors even when made in inference mode, so that later steps may run outside that mode.
        with normal_tensors():
            self.k = torch.empty((*shape, width), dtype=dtype, device=device)
            self.v = torch.empty((*shape, value_width or width), dtype=dtype, device=device)
        self.clean = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return self.k.untyped_storage().nbytes() + self.v.untyped_storage().nbytes()

    @classmethod
    def account(
        cls, spec: CacheSpec, rows: int, heads: int, widths: tuple[int, int], length: int, dtype: torch.dtype
    ) -> int:
        """See `KeyValueState.account`: every slot there is, used or not."""
        return rows * heads * cls.slots_for(spec, length) * sum(widths) * dtype.itemsize

    @classmethod
    def slots_for(cls, spec: CacheSpec, length: int) -> int:
        """Slots of a row that holds `length` tokens."""
        raise NotImplementedError(f"cache kind {cls.kind!r} gives no account of its bytes")

    @property
    def slots(self) -> int:
        """Slots in each row."""
        return self.k.shape[2]

    def in_place(self, step: Step, view: View) -> list[Tensor] | None:
        """See `KeyValueState.in_place`: `k` and `v`."""
        if not self.kernels_may_read or view[1:] != View(0)[1:] or step.given is not None:
            return None
        if step.start is None:
            self._zero_until(view.visible)
        self.clean = max(self.clean, step.end)
        return [self.k, self.v]

    def again(self, lengths: Lengths) -> None:
        """See `KeyValueState.again`."""
        end = lengths.longest + 1
        if lengths.ragged is not None:
            self._zero_until(end)
        elif end > self.clean:
            self.clean = end

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: WritingStep, kernel: Kernel, dropout: float) -> Tensor:
        """By the kernel in place, if it can and is told the lengths; else see `KeyValueState.attend`."""
        whole = step.step
        if whole.held is not None and not dropout and kernel.reads(q, k, v, self.k, self.v):  # type: ignore[attr-defined]
            parts = self.in_place(whole, step.view)
            if parts is not None:
                step.mark_written()
                return kernel.in_place(q, k, v, whole.held, *parts)  # type: ignore[attr-defined]
        return super().attend(q, k, v, step, kernel, dropout)

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` into the slots of `step`."""
        start, T = step.start, step.T
        if start is None:
            self._zero_until(view.visible)  # the shorter rows leave gaps
            start = 0
        for buffer, new in ((self.k, k), (self.v, v)):
            target = buffer.narrow(2, start, T)
            if new.shape != target.shape:  # a single row or token would broadcast
                raise ValueError(f"K or V {tuple(new.shape)} for a step of {T} tokens on {buffer.shape[0]} rows")
            if step.slots is None:
                target.copy_(new)
            else:
                _, heads, room, width = buffer.shape
                flat = new.to(buffer.dtype).reshape(-1, width)
                buffer.view(-1, width).index_copy_(0, step.places(heads, room), flat)
        if start + T > self.clean:
            self.clean = start + T

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`: views, no copy."""
        visible = view.visible
        if visible > self.clean:
            self._zero_until(visible)
        return self.k.narrow(2, 0, visible), self.v.narrow(2, 0, visible)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts both buffers."""
        with normal_tensors():
            self.k, self.v = self.k.to(device, dtype), self.v.to(device, dtype)

    def begin(self, step: Step) -> View:
        """Room for the step, shown in whole blocks where they fit."""
        return View(self._reserve(step.end, step.block))

    def _reserve(self, length: int, block: int = 1) -> int:
        """Makes room for `length` slots in every row; returns how many a view shows."""
        raise NotImplementedError

    def prefix(self, rows: int) -> Self:
        """See `LayerState.prefix`."""
        same = copy.copy(self)
        same.k, same.v = self.k.narrow(0, 0, rows), self.v.narrow(0, 0, rows)
        return same

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row `beams` times, neighbours first."""
        for name, old in (("k", self.k), ("v", self.v)):
            new = _empty(old, old.shape[0] * beams, self.slots)
            new[:, :, :length] = old[:, :, :length].repeat_interleave(beams, dim=0)
            setattr(self, name, new)
        self.clean = length

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`, in place, so that addresses stay; spare rows leave the view."""
        self.k, self.v = _select(self.k, rows, length), _select(self.v, rows, length)

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """`k` and `v` `(rows, H_kv, length, D_head)`: views, no copy."""
        return {"k": self.k[rows, :, :length], "v": self.v[rows, :, :length]}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`; beyond `length` they are zero."""
        if contents.keys() != {"k", "v"}:
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        self._reserve(length)
        self._zero_until(length)
        for buffer, new in ((self.k, contents["k"]), (self.v, contents["v"])):
            target = buffer[rows]
            target[:, :, :length] = new
            target[:, :, length : self.clean] = 0

    def clear(self, lengths: Lengths, until: int) -> None:
        """Zeroes each row's slots from its length up to `until`."""
        for buffer in (self.k, self.v):
            if lengths.uniform is not None:
                buffer[:, :, lengths.uniform : until] = 0
                continue
            beyond = torch.arange(until) >= lengths.tensor().unsqueeze(1)
            buffer[:, :, :until].masked_fill_(beyond.to(buffer.device)[:, None, :, None], 0)

    def _zero_until(self, slots: int) -> None:
        if slots <= self.clean:
            return
        for buffer in (self.k, self.v):
            buffer[:, :, self.clean : slots] = 0
        self.clean = slots


def taken(buffer: Tensor, origin: Tensor) -> Tensor:
    """`(rows, H, n, D_head)`: slot j of row i from buffer row `origin[i, j]`, `origin` `(rows, n)` int64."""
    slots = torch.arange(origin.shape[1], device=origin.device)
    return buffer.transpose(1, 2)[origin, slots].transpose(1, 2)


def placed(held: Tensor, new: Tensor) -> Tensor:
    """`new` in the memory of `held`, at its beginning."""
    return held.narrow(0, 0, len(new)).copy_(new)


def whole_blocks(length: int, block: int) -> int:
    """`length` rounded up to whole blocks."""
    return -(-length // block) * block


def _empty(like: Tensor, rows: int, slots: int) -> Tensor:
    with normal_tensors():
        return torch.empty((rows, like.shape[1], slots, like.shape[3]), dtype=like.dtype, device=like.device)


def normal_tensors() -> AbstractContextManager[None]:
    """For what has to last: a tensor made inside is a normal one, though inference mode may be on around it."""
    # Entering that mode takes longer than allocating, so not where nothing has to be left.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def grown(old: Tensor, slots: int, clean: int) -> Tensor:
    """A buffer of `slots` slots that holds the first `clean` of `old`."""
    new = _empty(old, old.shape[0], slots)
    new[:, :, :clean] = old[:, :, :clean]
    return new


def _select(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    kept = buffer.narrow(0, 0, len(rows))
    kept.narrow(2, 0, length).copy_(buffer.narrow(2, 0, length).index_select(0, rows))
    return kept
