"""One layer's share of a step, the `AttentionStep` that writes to a cache; and the step with every layer's share."""

import weakref
from collections.abc import Callable

from torch import Tensor

from translator.attention.kernels import Kernel
from translator.cache.empty import SharedState
from translator.cache.source import SourceState
from translator.cache.state import KeyValueState, LayerState
from translator.cache.step import Step


class LayerStep:
    """One layer's share of a step: an `AttentionStep` that writes to the layer's state."""

    __slots__ = ("_step", "source_state", "state", "view", "written")

    def __init__(self, state: LayerState, source_state: SourceState, step: Step) -> None:
        self.state = state
        self.source_state = source_state
        self.view = state.begin(step)
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
    def mask(self) -> Tensor | None:
        """What the layer's queries see of its view, as `scaled_dot_product_attention` takes it."""
        return self.step.mask(self.view)[0]

    @property
    def is_causal(self) -> bool:
        """Whether the mask is None because the kernel's own causal one is right."""
        return self.step.mask(self.view)[1]

    @property
    def positions(self) -> Tensor:
        """Positions of the T tokens, `(rows, T)`, int64."""
        return self.step.positions

    def mark_written(self) -> None:
        """This layer has done its share of the step; raises `RuntimeError` once the step is over."""
        _ = self.step
        self.written = True

    def in_place(self) -> list[Tensor] | None:
        """What a kernel works on that does this layer's share by itself; see `KeyValueState.in_place`."""
        return self.state.in_place(self.step, self.view) if isinstance(self.state, KeyValueState) else None

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

    def attend_again(self, q: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend_again`: over what the layer that owns K and V shows, under its mask."""
        state, step = self.state, self.step
        assert isinstance(state, SharedState) and isinstance(step, StackStep)
        owner = step.layers[state.owner]
        assert isinstance(owner.state, KeyValueState)
        k, v = owner.state.shown(owner.view)
        return kernel(q, k, v, owner.mask, owner.is_causal, dropout)

    def apart(self, x: Tensor) -> Tensor:
        """See `AttentionStep.apart`: `x` itself."""
        if self.step.given is not None:
            raise ValueError("this attention is causal and takes no mask of a caller's")
        return x

    def together(self, x: Tensor) -> Tensor:
        """See `AttentionStep.together`."""
        return x

    def source(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `AttentionStep.source`: K and V are there since the sentence came in; `project` isn't called."""
        return self.source_state.k, self.source_state.v, self.step.source_mask

    def attend_source(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionStep.attend_source`."""
        return kernel(q, k, v, mask, False, dropout)


class StackStep(Step):
    """A step and each layer's share of it: what `DecoderCache.begin` gives."""

    __slots__ = ("layers",)

    layers: list[LayerStep]
