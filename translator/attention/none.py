"""A layer without self-attention: an empty slot in the stack, which keeps nothing."""

from typing import Any

import torch
from torch import Tensor

from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure


class NoAttention(Structure):
    """Adds nothing to the residual: the layer is its cross-attention and its feed-forward part."""

    steps_alike = True
    shareable = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first

    def products(self) -> dict[str, Product]:
        """None."""
        return {}

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A state that holds nothing."""
        return spec.empty_state()

    def attend(
        self,
        x: Tensor,
        step: AttentionStep,
        ops: Products,
        *,
        norm: str | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`residual` itself, or zeros without one."""
        return torch.zeros_like(x) if residual is None else residual

    def reference(self, x: Tensor) -> Tensor:
        """Zeros."""
        return x * 0
