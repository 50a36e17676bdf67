"""The encoder: `nn.TransformerEncoderLayer`'s weights without its second, eval-only code path.

PyTorch's fast path gives other values in eval mode than in training (padding rows become zeros, an all-padding batch
raises), so training and inference share one path here.
"""

import torch
from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention
from translator.decoder_layer import Activation, activation_function


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
        x = x + self.dropout1(self.self_attn.self_attention(self.norm1(x), None, key_padding_mask))
        hidden = self.dropout(self.activation(self.linear1(self.norm2(x))))
        return x + self.dropout2(self.linear2(hidden))


class Encoder(nn.Module):
    """A stack of `EncoderLayer`s and a final norm."""

    def __init__(self, layers: list[EncoderLayer], d_model: int, layer_norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_eps)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`x` `(B, S, D)`, `key_padding_mask` `(B, S)` with True = padding → `(B, S, D)`."""
        if key_padding_mask is not None and not bool(key_padding_mask.any()):
            key_padding_mask = None
        for layer in self.layers:
            x = layer(x, key_padding_mask)
        return self.norm(x)


def position_table(length: int, width: int) -> Tensor:
    """Sinusoidal positions `(length, width)` (Vaswani et al. 2017, section 3.5): sines first, then cosines."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half) * (-torch.log(torch.tensor(10000.0)) / max(half - 1, 1)))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
