"""Multi-head attention taken apart: packed projection, split into heads, scaled dot product, output projection.

`nn.MultiheadAttention` keeps K and V out of reach between projecting and attending, which is where a cache belongs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.masks import causal_mask, merge_masks


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(B, T, D)` → `(B, H, T, D_head)`, a view."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`(B, H, T, D_head)` → `(B, T, D)`."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """`softmax(q kᵀ / √D_head + mask) v` (Vaswani et al. 2017) for q `(B, H, T, D_head)`, k, v `(B, H, S, D_head)`.

    `mask` broadcasts to `(B, H, T, S)`: bool with True = visible, or floats to add. A query that sees no key gives
    zeros, not NaN.
    """
    if q.dtype == torch.bfloat16 and q.requires_grad and q.device.type == "cpu" and not dropout:
        return _attend_by_products(q, k, v, mask, is_causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The same as two matrix products and a softmax: for training in bf16 on a CPU, where the fused kernel's backward
    pass is several times slower at sentence lengths."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if is_causal:
        mask = ~causal_mask(q.shape[2], k.shape[2], q.device)
    if mask is None:
        return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
    hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
    if mask.dtype != torch.bool:
        scores = scores + mask
    # The lowest finite number, not -inf: a query that sees nothing must not become NaN, forward or backward.
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    blind = hidden.all(dim=-1, keepdim=True)
    if bool(blind.any()):
        weights = weights.masked_fill(blind, 0)
    return torch.matmul(weights.to(v.dtype), v)


class CachedMultiheadAttention(nn.Module):
    """The parameters of `nn.MultiheadAttention` under the same names, with each stage callable on its own.

    `in_proj_weight` `(3 D, D)` and `in_proj_bias` `(3 D,)` stay packed; Q, K and V are views of them at run time.
    """

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
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first  # read by nn.TransformerDecoder when it holds these layers
        # In the order of nn.MultiheadAttention, so that the same seed gives the same weights.
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def dropout_is_active(self) -> bool:
        """Whether attention weights are dropped now."""
        return self.training and self.dropout > 0

    def qkv(self, x: Tensor) -> Tensor:
        """`(B, T, D)` → `(B, T, 3 D)`: Q, K and V side by side."""
        return F.linear(x, self.in_proj_weight, self.in_proj_bias)

    def q(self, x: Tensor) -> Tensor:
        """`(B, T, D)` → Q `(B, T, D)`, with the first third of the packed weight."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        return F.linear(x, self.in_proj_weight[: self.embed_dim], bias)

    def kv(self, memory: Tensor) -> Tensor:
        """`(B, S, D)` → `(B, S, 2 D)`: K and V side by side, with the other two thirds."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
        return F.linear(memory, self.in_proj_weight[self.embed_dim :], bias)

    def dropout_now(self) -> float:
        """The dropout probability on attention weights: 0 in eval mode."""
        return self.dropout if self.training else 0.0

    def self_attention(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Attention of `x` `(B, T, D)` to itself; masks in PyTorch's polarity (True = hidden)."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        shape = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        mask, is_causal = merge_masks(attn_mask, key_padding_mask, shape, q.dtype, is_causal)
        return self.out_proj(merge_heads(attend(q, k, v, mask, is_causal, self.dropout_now())))
