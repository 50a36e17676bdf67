"""The operations that encoder and decoder layers run on, by name, and their plain form in PyTorch."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from translator.attention.kernels import attend
from translator.attention.named_kernels import DEFAULT_KERNEL, AttentionKernel, named_kernel


class Operations(Protocol):
    """What a layer, or a structure in it, computes with. Always passed, so that a layer's code is written once.

    `eager` spells each operation in PyTorch; a fast engine does it in one call. A product is named as the layer or
    structure names it (`qkv`, `out_proj`, `linear1`), norms and dropouts as the layer does (`norm1`, `dropout1`).
    """

    def of(self, part: str) -> "Operations":
        """The operations of one part of the layer (`self_attn`), whose products go by its own names."""

    def product(
        self,
        name: str,
        x: Tensor,
        *,
        norm: str | None = None,
        activation: "Activation | None" = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`residual + dropout(activation(norm(x) Wᵀ + b))`, each part where it is asked for."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A norm that stands alone, as after a post-norm sublayer."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
    ) -> Tensor:
        """See `translator.attention.kernels.attend`."""


class StackOperations(Protocol):
    """What a stack of layers computes with."""

    @property
    def layers(self) -> "Sequence[Operations]":
        """Of each layer, first to last."""

    def norm(self, x: Tensor) -> Tensor:
        """The norm after the last layer; `x` itself where there is none."""


class ModelOperations(Protocol):
    """What a whole translation model computes with: embeddings, both stacks, logits."""

    @property
    def encoder(self) -> StackOperations:
        """Of the encoder."""

    @property
    def decoder(self) -> StackOperations:
        """Of the decoder."""

    def embed_source(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Vectors `(B, S, D)` of ids `(B, S)` at positions that broadcast to them."""

    def embed_target(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Vectors `(rows, T, D)` of ids `(rows, T)` at positions that broadcast to them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`(…, D)` → `(…, V)`."""


class Activation(Protocol):
    """`relu`, `gelu` or any other function of one tensor."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Elementwise."""


class EagerOperations:
    """The reference: modules and methods of the layer itself, on its parameters as they are at the call."""

    __slots__ = ("layer", "part")

    attention = staticmethod(attend)

    def __init__(self, layer: nn.Module, part: nn.Module | None = None) -> None:
        self.layer = layer
        self.part = layer if part is None else part

    def of(self, part: str) -> "EagerOperations":
        """See `Operations.of`."""
        return EagerOperations(self.layer, self.layer._modules[part])

    def product(
        self,
        name: str,
        x: Tensor,
        *,
        norm: str | None = None,
        activation: Activation | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Operations.product`."""
        modules = self.layer._modules
        if norm is not None:
            x = modules[norm](x)  # type: ignore[misc]
        # Modules first, where they are kept: nn.Module finds them last, and slowly.
        compute = self.part._modules.get(name)
        y: Tensor = (getattr(self.part, name) if compute is None else compute)(x)
        if activation is not None:
            y = activation(y)
        if dropout is not None:
            module = modules[dropout]
            if module.training:  # type: ignore[union-attr]
                y = module(y)  # type: ignore[misc]
        return y if residual is None else residual + y

    def norm(self, name: str, x: Tensor) -> Tensor:
        """See `Operations.norm`."""
        return self.layer._modules[name](x)  # type: ignore[misc]


class ChosenKernel(EagerOperations):
    """The same with another attention kernel."""

    __slots__ = ("attention",)

    def __init__(self, layer: nn.Module, kernel: AttentionKernel, part: nn.Module | None = None) -> None:
        super().__init__(layer, part)
        self.attention = kernel

    def of(self, part: str) -> "ChosenKernel":
        """See `Operations.of`."""
        return ChosenKernel(self.layer, self.attention, self.layer._modules[part])  # type: ignore[arg-type]


class KernelChoice:
    """A stack of layers whose attention kernel can be chosen, by name."""

    chosen_kernel: AttentionKernel | None = None
    """None for the usual one, which costs no look-up."""

    @property
    def attention_kernel(self) -> str:
        """What attends in plain PyTorch, one of `translator.attention.KERNELS`; engines have kernels of their own.

        Setting it raises `UserError` for an unknown kernel, and for one that can't run where the stack is.
        """
        return DEFAULT_KERNEL if self.chosen_kernel is None else self.chosen_kernel.name

    @attention_kernel.setter
    def attention_kernel(self, name: str) -> None:
        parameter = next(self.parameters(), None)  # type: ignore[attr-defined]
        kernel = named_kernel(name, torch.device("cpu") if parameter is None else parameter.device)
        self.chosen_kernel = None if name == DEFAULT_KERNEL else kernel


class EagerStack:
    """The layers of a stack and its `norm`, as they are at the call."""

    __slots__ = ("layers", "stack")

    def __init__(self, stack: nn.Module, layers: Iterable[nn.Module], kernel: AttentionKernel | None = None) -> None:
        """`kernel` is what attends in the place of the usual one."""
        self.stack = stack
        self.layers: Sequence[Operations] = [
            EagerOperations(layer) if kernel is None else ChosenKernel(layer, kernel) for layer in layers
        ]

    def norm(self, x: Tensor) -> Tensor:
        """See `StackOperations.norm`."""
        norm = self.stack.norm
        return x if norm is None else norm(x)  # type: ignore[operator]
