"""Label-smoothed cross entropy over real target tokens."""

import torch
from torch import Tensor


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Sum over N tokens of `(1 - ε) · -log p(target) + ε · mean over V of -log p`, with its gradient in one piece.

    The vocabulary is the widest tensor of a step: the plain formula keeps several copies of it.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:  # type: ignore[no-untyped-def]
        scores = logits.float()
        normaliser = scores.logsumexp(dim=1)
        chosen = scores.gather(1, target.unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(logits, normaliser, target)
        ctx.smoothing = smoothing
        return (normaliser - (1 - smoothing) * chosen - smoothing * scores.mean(dim=1)).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        logits, normaliser, target = ctx.saved_tensors
        slope = (logits.float() - normaliser.unsqueeze(1)).exp_().sub_(ctx.smoothing / logits.shape[1])
        hit = slope.new_full((len(target), 1), ctx.smoothing - 1)
        slope.scatter_add_(1, target.unsqueeze(1), hit)
        return slope.mul_(grad).to(logits.dtype), None, None


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """The summed loss of `logits` `(N, V)` against ids `(N,)` (Szegedy et al. 2016), in fp32 or better.

    Padding is left out by the caller, before the vocabulary is even computed: it can't count here. N may be 0.
    """
    if logits.dtype == torch.float64:
        return torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
    return _SmoothedCrossEntropy.apply(logits, target, smoothing)
