"""The packed engine's work in PyTorch's own prepacked forms: for machines without the native kernels.

The only file that names operators PyTorch does not document. Where one is missing, or refuses, the plain product stands
in for it on the same rounded weights.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import Product
from translator.engine.base import parameter_versions
from translator.engine.eager import EagerEngine
from translator.engine.native.library import missing
from translator.engine.native.weights import TYPES, chosen_type
from translator.errors import UserError
from translator.model import EagerModel, TranslationModel
from translator.operations import Activation, EagerOperations, EagerStack

log = logging.getLogger("translator")

Form = Callable[[Tensor], Tensor]
"""`x` `(…, K)` → `(…, N)`."""


def forms(products: Mapping[str, Product], compute_type: str) -> dict[str, Form]:
    """Each product, prepared; raises `UserError` for an unknown type or a weight that isn't finite in it."""
    kind = chosen_type(compute_type, products)
    made = {}
    for name, (weight, bias) in products.items():
        weight = weight.detach().float()
        rounded = weight.to(getattr(torch, kind)).float() if kind != "int8" else weight
        if not bool(rounded.isfinite().all()):
            raise UserError(f"weight {name}: holds a number that is not finite, or too large for the compute type")
        made[name] = _MAKERS[kind](rounded, None if bias is None else bias.detach().float())
    return made


class PrepackedEngine(EagerEngine):
    """See `Engine`: an `EagerEngine` on prepared products."""

    def __init__(self, model: TranslationModel, compute_type: str) -> None:
        super().__init__(model)
        say_once()
        self.operations = PrepackedModel(model, forms(model.products(), compute_type))
        self._versions = parameter_versions(model)

    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Engine.encode`. Raises `RuntimeError` when the model was trained on meanwhile."""
        if parameter_versions(self.model) != self._versions:
            raise RuntimeError("the model's weights have changed since they were packed: make a new engine of it")
        return super().encode(source, key_padding_mask)


class PrepackedModel(EagerModel):
    """`ModelOperations` on prepared products."""

    def __init__(self, model: TranslationModel, made: Mapping[str, Form]) -> None:
        super().__init__(model)
        self.made = made
        self.encoder = PrepackedStack(model.encoder, model.encoder.layers, _under("encoder.layers.", made))
        self.decoder = PrepackedStack(model.decoder, model.decoder.layers, _under("decoder.layers.", made))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ModelOperations.logits`."""
        return self.made["logits"](hidden)


class PrepackedStack(EagerStack):
    """`StackOperations` on prepared products, which are named by the layer's number and their own name."""

    def __init__(self, stack: nn.Module, layers: Iterable[nn.Module], made: Mapping[str, Form]) -> None:
        super().__init__(stack, ())
        self.layers = [PrepackedOperations(layer, _under(f"{i}.", made)) for i, layer in enumerate(layers)]


class PrepackedOperations(EagerOperations):
    """See `Operations`; what isn't a prepared product is done as `EagerOperations` does it."""

    __slots__ = ("made",)

    def __init__(self, layer: nn.Module, made: Mapping[str, Form], part: nn.Module | None = None) -> None:
        super().__init__(layer, part)
        self.made = made

    def of(self, part: str) -> "PrepackedOperations":
        """See `Operations.of`."""
        return PrepackedOperations(self.layer, _under(f"{part}.", self.made), self.layer._modules[part])

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
        """See `Operations.product`; dropout is training's, and not done here."""
        if norm is not None:
            x = self.layer._modules[norm](x)  # type: ignore[misc]
        y = self.made[name](x)
        if activation is not None:
            y = activation(y)
        return y if residual is None else residual + y


@lru_cache
def say_once() -> None:
    """That the native kernels are missing, and why."""
    log.warning("no native kernels (%s): PyTorch does their work, slower", missing())


def _float32(weight: Tensor, bias: Tensor | None) -> Form:
    # oneDNN's prepacked product was no faster at few rows where it was measured.
    return lambda x: F.linear(x, weight, bias)


def _float16(weight: Tensor, bias: Tensor | None) -> Form:
    """fp16 weights, fp32 inputs and sums (FBGEMM)."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        torch.ops.quantized.linear_dynamic_fp16(weight.new_zeros(1, weight.shape[1]), packed)
    except (RuntimeError, AttributeError, NotImplementedError):
        return _float32(weight, bias)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x.contiguous(), packed)


def _int8(weight: Tensor, bias: Tensor | None) -> Form:
    """A scale for each output and each row of inputs, exact sums."""
    scale = _scale(weight)
    codes = (weight / scale).round().to(torch.int8).t()

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        steps = _scale(rows)
        sums = torch._int_mm((rows / steps).round().to(torch.int8), codes)
        y = sums.float() * (steps * scale.t())
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)

    return product


def _scale(rows: Tensor) -> Tensor:
    """What one code of 127 is worth in each row, `(rows, 1)`."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest, 1) / 127


_MAKERS: dict[str, Callable[[Tensor, Tensor | None], Form]] = {
    "float32": _float32,
    "float16": _float16,
    "bfloat16": _float32,  # PyTorch's own bf16 products round the inputs too
    "int8": _int8,
}
assert _MAKERS.keys() == TYPES.keys()


def _under(prefix: str, made: Mapping[str, Form]) -> dict[str, Form]:
    return {name.removeprefix(prefix): form for name, form in made.items() if name.startswith(prefix)}
