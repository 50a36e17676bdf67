"""Dropout from eight random bits an element, not a float draw: on a CPU, drawing is a third of a training step."""

import torch
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """Zeroes elements with probability `p`, rounded to 1/256 (at most 255/256), and scales the rest to keep the mean.

    Draws from PyTorch's default generator of the input's device, so saving that generator's state makes a resumed run
    exact.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be at least 0 and below 1, not {p}")
        self.p = p
        self.threshold = min(round(p * 256), 255)

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape, dropped in training mode, as it is in eval mode."""
        if not self.training or self.threshold == 0:
            return x
        return _Drop.apply(x, self.threshold)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"p={self.p}"


class _Drop(torch.autograd.Function):
    """Keeps one byte an element for the backward pass, where plain autograd would keep a mask in the input's type."""

    @staticmethod
    def forward(ctx, x: Tensor, threshold: int) -> Tensor:  # type: ignore[no-untyped-def]
        count = x.numel()
        words = torch.empty((count + 7) // 8, dtype=torch.int64, device=x.device)
        words.random_(-(2**63), None)  # None: the whole 64-bit range
        keep = words.view(torch.uint8)[:count].view(x.shape) >= threshold
        ctx.save_for_backward(keep)
        ctx.scale = 256 / (256 - threshold)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None
