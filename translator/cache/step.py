"""A step of T tokens on the whole stack, and one layer's share of it."""

import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from translator.attention.kernels import Kernel
from translator.attention.masks import restrict, view_mask
from translator.cache.lengths import Lengths
from translator.cache.source import SourceState
from translator.cache.state import KeyValueState, LayerState


class KeyPositions(Protocol):
    """Where the slots of a view stand, for states that keep tokens elsewhere than at their position."""

    def __call__(self, lengths: Lengths, T: int, device: torch.device) -> Tensor:
        """Positions `(visible,)` or `(rows, visible)` of the slots' tokens, the new ones included; -1 is empty."""

    def __hash__(self) -> int:
        """Equal ones share a mask."""


class View(NamedTuple):
    """Which slots a step sees in a layer: `visible` of them, slot i at position i unless `keys` says otherwise.

    With a `window`, a query sees itself and the `window - 1` positions before it. One mask is made for each distinct
    view of a step.
    """

    visible: int
    window: int | None = None
    keys: KeyPositions | None = None


class Step:
    """T tokens on the whole stack: positions, slots and masks, worked out once from the lengths.

    `start` is the slot of the first new token where all rows agree, else `slots` `(rows, T)` says for each. Masks have
    `scaled_dot_product_attention`'s polarity (True = visible). `closed` once committed or rolled back: nothing more is
    written then.
    """

    __slots__ = (
        "T",
        "__weakref__",
        "_masks",
        "_positions",
        "block",
        "closed",
        "device",
        "end",
        "given",
        "layers",
        "lengths",
        "slots",
        "source_mask",
        "start",
    )

    def __init__(
        self,
        T: int,
        lengths: Lengths,
        device: torch.device,
        *,
        block: int = 1,
        source_mask: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        """`given` is a caller's own mask `(…, T or 1, past + T)`, which hides more; `source_mask` `(B, 1, 1, S)`."""
        self.T = T
        self.lengths = lengths
        self.device = device
        self.block = block
        self.source_mask = source_mask
        self.given = given
        self.start = lengths.uniform
        self.slots = None if lengths.uniform is not None else lengths.slots(T, device)
        self.end = lengths.longest + T
        self.closed = False
        self.layers: list[LayerStep] = []
        self._positions: Tensor | None = None
        self._masks: dict[View, tuple[Tensor | None, bool]] = {}

    @property
    def positions(self) -> Tensor:
        """Positions of the T tokens, `(rows, T)`, int64."""
        if self._positions is None:
            self._positions = self.lengths.positions(self.T, self.device)
        return self._positions

    def mask(self, view: View) -> tuple[Tensor | None, bool]:
        """`(mask, is_causal)` of what this view shows: None, `(T, visible)` or `(rows, 1, T, visible)`."""
        known = self._masks.get(view)
        if known is None:
            known = self._masks[view] = self._made(view)
        return known

    def _made(self, view: View) -> tuple[Tensor | None, bool]:
        keys = None if view.keys is None else view.keys(self.lengths, self.T, self.device)
        past = self.lengths.uniform if self.lengths.uniform is not None else self.lengths.tensor()
        mask, is_causal = view_mask(past, self.T, view.visible, self.device, view.window, keys)
        if self.given is None:
            return mask, is_causal
        return restrict(self.given, mask, is_causal, self.T, keys), False


class LayerStep:
    """One layer's share of a step: an `AttentionStep` that writes to the layer's state."""

    __slots__ = ("_step", "is_causal", "mask", "source_state", "state", "view", "written")

    def __init__(self, state: LayerState, source_state: SourceState, step: Step) -> None:
        self.state = state
        self.source_state = source_state
        self.view = state.begin(step)
        self.mask, self.is_causal = step.mask(self.view)
        # Weak, since the step holds its layers: a cycle would keep K and V until the garbage collector comes round.
        self._step = weakref.ref(step)
        self.written = False

    @property
    def step(self) -> Step:
        """The whole stack's step; raises `RuntimeError` once it is over."""
        step = self._step()
        if step is None or step.closed:
            raise RuntimeError("this step is over: it was committed, or another was begun or the grid changed since")
        return step

    @property
    def positions(self) -> Tensor:
        """Positions of the T tokens, `(rows, T)`, int64."""
        return self.step.positions

    def mark_written(self) -> None:
        """This layer has done its share of the step; raises `RuntimeError` once the step is over."""
        _ = self.step
        self.written = True

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends `k, v` `(rows, H_kv, T, D_head)` and returns all of K and V. The one line that knows of caching."""
        state = self.state
        assert isinstance(state, KeyValueState)
        state.append(k, v, self.step, self.view)
        self.written = True
        return state.shown(self.view)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend`; the state may read its own form instead of calling `kernel`."""
        state = self.state
        assert isinstance(state, KeyValueState)
        return state.attend(q, k, v, self, kernel, dropout)

    def source(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `AttentionStep.source`: K and V are there since the sentence came in; `project` isn't called."""
        return self.source_state.k, self.source_state.v, self.step.source_mask
