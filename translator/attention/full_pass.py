"""A pass over whole sequences, with no cache behind it: training, and the reference for everything cached."""

from collections.abc import Callable

import torch
from torch import Tensor

from translator.attention.kernels import Kernel


class FullPass:
    """An `AttentionStep` over all T tokens at once; masks in `scaled_dot_product_attention`'s polarity.

    `mask` broadcasts to `(B, H, T, T)`, `source_mask` to `(B, H, T, S)`; `memory` is `(B, S, D)`, None for an encoder.
    """

    state = None

    def __init__(
        self,
        T: int,
        mask: Tensor | None,
        is_causal: bool = False,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> None:
        self.T = T
        self.mask = mask
        self.is_causal = is_causal
        self.memory = memory
        self.source_mask = source_mask
        self._last: tuple[Tensor, Tensor] | None = None

    @property
    def positions(self) -> Tensor:
        """`(1, T)`, from 0."""
        return torch.arange(self.T, device=None if self.mask is None else self.mask.device).unsqueeze(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend`."""
        self._last = k, v
        return kernel(q, k, v, self.mask, self.is_causal, dropout)

    def attend_again(self, q: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend_again`: over the last K and V that came by."""
        assert self._last is not None
        return self.attend(q, *self._last, kernel, dropout)

    def apart(self, x: Tensor) -> Tensor:
        """See `AttentionStep.apart`: `x` itself."""
        if self.mask is not None or not (self.is_causal or self.T == 1):
            raise ValueError("this attention is causal and takes no mask: pass tgt_is_causal=True and nothing else")
        return x

    def together(self, x: Tensor) -> Tensor:
        """See `AttentionStep.together`."""
        return x

    def source(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `AttentionStep.source`."""
        if self.memory is None:
            raise ValueError("an encoder's pass has no source to attend to")
        k, v = project(self.memory)
        return k, v, self.source_mask

    def attend_source(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionStep.attend_source`."""
        return kernel(q, k, v, mask, False, dropout)
