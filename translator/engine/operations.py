"""The operations that encoder and decoder layers run on, by name, and their plain form in PyTorch."""

from typing import Protocol

from torch import Tensor, nn

from translator.attention.kernels import attend


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
        y: Tensor = getattr(self.part, name)(x)
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
