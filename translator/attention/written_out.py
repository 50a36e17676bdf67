"""Attention as it is defined, one token after another, to set beside what computes it in one go: for proofs alone."""

import math

import torch
from torch import Tensor

from translator.attention.band import Band


def by_token(q: Tensor, k: Tensor, v: Tensor, band: Band | None = None, sink: Tensor | None = None) -> Tensor:
    """q `(rows, T, H, D_head)` over k, v `(rows, T, H_kv, D_head)`, causal → `(rows, T, H * D_head)`.

    A token gets no more keys than it sees: there is no mask that could be wrong. `sink` `(H,)` are logits of nothing.
    """
    kv_heads, outputs = k.shape[2], []
    for t in range(q.shape[1]):
        first = 0 if band is None else max(0, band.first(t))
        query = q[:, t].unflatten(1, (kv_heads, -1))  # (rows, H_kv, group, D_head)
        scores = torch.einsum("rghd,rsgd->rghs", query, k[:, first : t + 1]) / math.sqrt(q.shape[-1])
        if sink is not None:
            nothing = sink.to(scores.dtype).view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([nothing, scores], dim=-1)
        weights = scores.softmax(dim=-1)[..., -(t + 1 - first) :]
        outputs.append(torch.einsum("rghs,rsgd->rghd", weights, v[:, first : t + 1]).flatten(1))
    return torch.stack(outputs, dim=1)


def turned_plainly(x: Tensor, base: float | None) -> Tensor:
    """`x` `(rows, T, heads, D_head)` turned to positions 0, 1, 2, …: products of complex numbers; as it is without a
    `base`."""
    if base is None:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * rates
    parts = x.to(wide)
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(parts[..., :half], parts[..., half:])
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
