"""A learned attention sink: somewhere for a head's attention to go when no token deserves it.

Models put much weight on the first token for want of a better place (Xiao et al. 2023, Efficient Streaming Language
Models with Attention Sinks). One learned logit a head in the softmax's denominator is that place, with no token and no
slot in any cache (OpenAI 2025, gpt-oss).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from translator.attention.masks import causal_mask


class SinkKernel:
    """A kernel as `translator.attention.kernels.attend` whose weights add up to less than 1; the logits
    `sink` `(H,)` have the rest.

    Written out, since no fused kernel knows of it; scores and softmax are in fp32 at least.
    """

    def __init__(self, sink: Tensor) -> None:
        self.sink = sink

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """`(B, H, T, D_head)`; a query that sees no key gives zeros."""
        k, v = (part.to(q.dtype) for part in (k, v))  # they may be kept in another type
        if k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)).to(wide)
        if is_causal:
            mask = ~causal_mask(q.shape[2], k.shape[2], q.device)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        sink = self.sink.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        if dropout:
            weights = F.dropout(weights, dropout)
        return torch.matmul(weights.to(v.dtype), v)

    def reads(self, *parts: Tensor) -> bool:
        """Nothing in place: no kernel that does so has a sink."""
        return False
