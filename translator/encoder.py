"""The encoder: `nn.TransformerEncoderLayer`'s weights without its second, eval-only code path.

PyTorch's fast path gives other values in eval mode than in training (padding rows become zeros, an all-padding batch
raises), so training and inference share one path here.
"""

from typing import cast

from torch import Tensor, nn

from translator.attention import AttentionStep, CachedMultiheadAttention, FullPass, Product
from translator.attention.masks import merge_masks
from translator.decoder_layer import activation_function
from translator.operations import Activation, EagerOperations, EagerStack, KernelChoice, Operations, StackOperations


class EncoderLayer(nn.Module):
    """Pre-norm encoder layer, batch first, with the `state_dict` of `nn.TransformerEncoderLayer(norm_first=True)`."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        activation: str | Activation = "relu",
        layer_norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.self_attn = CachedMultiheadAttention(d_model, nhead, dropout, batch_first=True)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout: nn.Module = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.dropout1: nn.Module = nn.Dropout(dropout)
        self.dropout2: nn.Module = nn.Dropout(dropout)
        self.activation = activation_function(activation)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`x` `(B, S, D)`, `key_padding_mask` `(B, S)` with True = padding → `(B, S, D)`."""
        return self.run(x, encoder_pass(x, self.self_attn.num_heads, key_padding_mask), EagerOperations(self))

    def run(self, x: Tensor, whole: AttentionStep, ops: Operations) -> Tensor:
        """The layer itself, `x` `(B, S, D)`, on an engine's operations."""
        x = self.self_attn.attend(x, whole, ops.of("self_attn"), norm="norm1", dropout="dropout1", residual=x)
        hidden = ops.product("linear1", x, norm="norm2", activation=self.activation, dropout="dropout")
        return ops.product("linear2", hidden, dropout="dropout2", residual=x)

    def products(self) -> dict[str, Product]:
        """Weight and bias of every product, by part and name: what an engine prepares."""
        own = self.self_attn.products()
        return {
            **{f"self_attn.{name}": own[name] for name in ("qkv", "out_proj")},
            "linear1": (self.linear1.weight, self.linear1.bias),
            "linear2": (self.linear2.weight, self.linear2.bias),
        }


def encoder_pass(x: Tensor, heads: int, key_padding_mask: Tensor | None) -> FullPass:
    """The pass of `x` `(B, S, D)` under `key_padding_mask` `(B, S)`, True = padding."""
    B, S = x.shape[:2]
    mask, _ = merge_masks(None, key_padding_mask, (B, heads, S, S), x.dtype)
    return FullPass(S, mask)


class Encoder(KernelChoice, nn.Module):
    """A stack of `EncoderLayer`s and a final norm."""

    def __init__(self, layers: list[EncoderLayer], d_model: int, layer_norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_eps)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`x` `(B, S, D)`, `key_padding_mask` `(B, S)` with True = padding → `(B, S, D)`."""
        return self.run(x, key_padding_mask, self.operations())

    @property
    def stack(self) -> list[EncoderLayer]:
        """`layers`, with their type."""
        return cast(list[EncoderLayer], list(self.layers))

    def operations(self) -> StackOperations:
        """The plain operations, on the parameters as they are: training, and the reference."""
        return EagerStack(self, self.layers, self.chosen_kernel)

    def run(self, x: Tensor, key_padding_mask: Tensor | None, operations: StackOperations) -> Tensor:
        """`forward` on an engine's operations."""
        if key_padding_mask is not None and not bool(key_padding_mask.any()):
            key_padding_mask = None
        layers = self.stack
        whole = encoder_pass(x, layers[0].self_attn.num_heads, key_padding_mask) if layers else None
        for layer, ops in zip(layers, operations.layers, strict=True):
            assert whole is not None
            x = layer.run(x, whole, ops)
        return operations.norm(x)
