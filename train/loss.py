"""Label-smoothed cross entropy over real target tokens."""

import torch
from torch import Tensor

_CHUNK = 1 << 20  # logits at a time: what is made of them stays in the cache


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Sum over N tokens of `(1 - ε) · -log p(target) + ε · mean over V of -log p`, and its gradient with it.

    The vocabulary is the widest tensor of a step. The plain formula keeps several copies of it in fp32; here a few rows
    at a time are taken through loss and gradient, and what stays is the gradient, in the logits' own type.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:  # type: ignore[no-untyped-def]
        N, V = logits.shape
        slope = torch.empty_like(logits) if logits.requires_grad else None
        loss = logits.new_zeros((), dtype=torch.float32)
        rows = max(1, _CHUNK // V)
        for begin in range(0, N, rows):
            part = slice(begin, begin + rows)
            scores, chosen = logits[part].float(), target[part].unsqueeze(1)
            highest = scores.amax(dim=1, keepdim=True)
            shifted = scores - highest
            hits, mean = shifted.gather(1, chosen), shifted.mean(dim=1, keepdim=True)
            total = shifted.exp_().sum(dim=1, keepdim=True)
            loss += (total.log() - (1 - smoothing) * hits - smoothing * mean).sum()
            if slope is not None:
                shifted.div_(total).sub_(smoothing / V)
                slope[part] = shifted.scatter_add_(1, chosen, shifted.new_full(chosen.shape, smoothing - 1))
        if slope is not None:
            ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return slope * float(grad), None, None


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """The summed loss of `logits` `(N, V)` against ids `(N,)` (Szegedy et al. 2016), in fp32 or better.

    Padding is left out by the caller, before the vocabulary is even computed: it can't count here. N may be 0.
    """
    if logits.dtype == torch.float64:
        return torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
    return _SmoothedCrossEntropy.apply(logits, target, smoothing)
