"""The dense attention kernel, and heads taken apart and put together."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from translator.attention.masks import causal_mask

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""`kernel(q, k, v, mask, is_causal, dropout)`, as `attend` below."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(B, T, D)` → `(B, H, T, D_head)`, a view."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`(B, H, T, D_head)` → `(B, T, D)`."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """`softmax(q kᵀ / √D_head + mask) v` (Vaswani et al. 2017) for q `(B, H, T, D_head)`, k, v `(B, H_kv, S, D_head)`.

    Each of the `H_kv` key heads serves `H / H_kv` neighbouring query heads. `mask` broadcasts to `(B, H, T, S)`: bool
    with True = visible, or floats to add. A query that sees no key gives zeros, not NaN.
    """
    if q.dtype != k.dtype:  # K and V may be kept in another type than the layer computes in
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(k.dtype)
        return attend(q.to(k.dtype), k, v, mask, is_causal, dropout).to(q.dtype)
    if k.shape[1] != q.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
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
