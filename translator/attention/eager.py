"""Attention written out: two products and a softmax, every number in between there to be looked at."""

import torch
import torch.nn.functional as F
from torch import Tensor

from translator.attention.masks import causal_mask
from translator.attention.named_kernels import AttentionKernel, in_one_type, register_kernel, repeated


@register_kernel
class EagerKernel(AttentionKernel):
    """The only kernel that returns weights, for it is the only one that ever has them: `B H T S` numbers in memory.

    The softmax is in fp32 at least.
    """

    name = "eager"
    mask = "always a tensor, the causal one too"
    returns_weights = True

    def stores_scores(self, device: torch.device) -> bool:
        """Always, and their softmax too."""
        return True

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionKernel`."""
        return self._attended(q, k, v, mask, is_causal, dropout)[0]

    def weighed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.weighed`; each row of the weights adds up to 1, or to 0 where no key is seen."""
        return self._attended(q, k, v, mask, is_causal, 0.0)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
    ) -> tuple[Tensor, Tensor]:
        given = q.dtype
        q, mask = in_one_type(q, k, mask)
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if is_causal:
            mask = ~causal_mask(q.shape[2], k.shape[2], q.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        # A query that sees no key would be 0 / 0.
        weights = scores.softmax(dim=-1).masked_fill(scores.isneginf().all(dim=-1, keepdim=True), 0)
        weights = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(weights.to(v.dtype), v).to(given), weights
