"""`Operations` of a training step on a CPU: fused, by `train.fused`, where kernels are there; else plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import fused
from translator.attention import CachedMultiheadAttention, Packing, attend
from translator.dropout import ByteDropout
from translator.engine.native import library
from translator.model import EagerModel, TranslationModel
from translator.operations import Activation, EagerOperations, Operations

_Cast = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""Weight and bias as parameters, and both in the step's type."""


class Casts:
    """A model's weights and biases in the type a step computes in, by place and product."""

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.all: dict[str, _Cast] = {}
        for place, (weight, bias) in model.products().items():
            if place.endswith((".self_attn.q", ".self_attn.kv")):
                continue  # parts of `qkv` that only a cross-attention calls
            self.all[place] = (
                weight,
                bias,
                weight.detach().to(dtype),
                None if bias is None else bias.detach().to(dtype),
            )

    def refresh(self) -> None:
        """Brings the copies up to the parameters."""
        if self.dtype == torch.float32:
            return
        copies, given = [], []
        for weight, bias, cast, cast_bias in self.all.values():
            copies.append(cast)
            given.append(weight)
            if bias is not None and cast_bias is not None:
                copies.append(cast_bias)
                given.append(bias)
        with torch.no_grad():
            torch._foreach_copy_(copies, given)


class FusedModel(EagerModel):
    """`ModelOperations` for one pass of training, on one thread of many: its `seed` alone decides what is dropped."""

    def __init__(self, model: TranslationModel, casts: Casts, seed: int) -> None:
        super().__init__(model)
        self.step = fused.Step(library.load(), casts.dtype, seed)
        self.casts = casts
        self.encoder = _Stack(self, model.encoder, "encoder")
        self.decoder = _Stack(self, model.decoder, "decoder")

    def embed_source(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_source`."""
        return self._embed(ids, self.model.source_positions(positions))

    def embed_target(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_target`."""
        return self._embed(ids, self.model.target_positions(positions))

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        model = self.model
        threshold = model.dropout.threshold if model.dropout.training else 0
        scale = math.sqrt(model.config.d_model)
        return fused.Embed.apply(ids[0], model.embedding.weight, positions, scale, threshold, self.step).unsqueeze(0)

    def loss(self, hidden: Tensor, target: Tensor, smoothing: float, scale: float) -> Tensor:
        """The summed loss of hidden states `(N, D)` against ids `(N,)`, times `scale`."""
        weight, _, cast, _ = self.casts.all["logits"]
        return fused.Loss.apply(hidden, weight, cast, target, smoothing, scale, self.step)


class _Stack:
    def __init__(self, model: FusedModel, stack: nn.Module, place: str) -> None:
        self.model, self.stack = model, stack
        self.layers: list[Operations] = [
            FusedOperations(model, layer, layer, f"{place}.layers.{index}.")
            for index, layer in enumerate(stack.get_submodule("layers").children())
        ]

    def norm(self, x: Tensor) -> Tensor:
        """See `StackOperations.norm`."""
        norm = self.stack.get_submodule("norm")
        return fused.Norm.apply(x[0], norm.weight, norm.bias, norm.eps, self.model.step).unsqueeze(0)


class FusedOperations(EagerOperations):
    """A layer's operations on one packed row `(1, N, D)`."""

    __slots__ = ("attention", "model", "place")

    def __init__(self, model: FusedModel, layer: nn.Module, part: nn.Module, place: str) -> None:
        super().__init__(layer, part)
        self.model, self.place = model, place
        self.attention = PackedKernel(model.step)

    def of(self, part: str) -> "FusedOperations":
        """See `Operations.of`."""
        return FusedOperations(self.model, self.layer, self.layer.get_submodule(part), f"{self.place}{part}.")

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
        """See `Operations.product`; raises `ValueError` for what no layer asks for and no kernel does."""
        if activation is not None and residual is not None:
            raise ValueError(f"{self.place}{name}: an activation and a residual behind one product are not fused")
        if dropout is not None and activation is None and residual is None:
            raise ValueError(f"{self.place}{name}: dropout is fused with an activation or a residual, not alone")
        weight, bias, cast, cast_bias = self.model.casts.all[self.place + name]
        gamma = beta = None
        eps = 0.0
        if norm is not None:
            layer_norm = self.layer.get_submodule(norm)
            assert isinstance(layer_norm, nn.LayerNorm)
            gamma, beta, eps = layer_norm.weight, layer_norm.bias, layer_norm.eps
        threshold = 0
        if dropout is not None:
            drop = self.layer.get_submodule(dropout)
            assert isinstance(drop, ByteDropout)
            threshold = drop.threshold if drop.training else 0
        y = fused.Product.apply(
            *(x[0], weight, bias, gamma, beta, None if residual is None else residual[0], cast, cast_bias),
            *(eps, activation is not None, threshold, self.model.step),
        )
        return y.unsqueeze(0)


class PackedKernel:
    """The dense kernel, and a form of it that `PackedPass` calls without padding."""

    def __init__(self, step: fused.Step) -> None:
        self.step = step

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `translator.attention.kernels.attend`."""
        return attend(q, k, v, mask, is_causal, dropout)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, is_causal: bool) -> Tensor:
        """See `PackedPass.attend`."""
        return fused.Attention.apply(q, k, v, queries, keys, is_causal, self.step)


def can_fuse(model: TranslationModel, dtype: torch.dtype) -> bool:
    """Whether fused operations can train `model` in `dtype`, or plain PyTorch has to.

    They need the kernels, the CPU, float32 or bfloat16, and layers of ReLU and packed multi-head attention without
    dropout on its weights.
    """
    weight = model.embedding.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or dtype not in fused.TYPES:
        return False
    layers = [*model.encoder.stack, *model.decoder.stack]
    plain = all(
        layer.activation is F.relu and type(layer.self_attn) is CachedMultiheadAttention and not layer.self_attn.dropout
        for layer in layers
    )
    return plain and model.decoder.norm is not None and library.available()
