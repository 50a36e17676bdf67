"""Numbers as codes of a few bits: what a quantised container keeps."""

import torch
from torch import Tensor

BITS = (2, 4, 8)


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and lowest value of groups `(…, size)`: `(…, size · bits / 8)` uint8, `(…)`, `(…)`.

    Asymmetric and even (KIVI, Liu et al. 2024): the lowest number of a group is code 0, the highest code `2^bits - 1`.
    Raises `ValueError` for a size of which the codes don't fill whole bytes.
    """
    if x.shape[-1] * bits % 8:
        raise ValueError(f"{x.shape[-1]} codes of {bits} bits don't fill whole bytes")
    low, high = x.amin(-1), x.amax(-1)
    scale = (high - low) / (2**bits - 1)
    steps = (x - low.unsqueeze(-1)) / torch.where(scale == 0, 1, scale).unsqueeze(-1)
    codes = steps.round().nan_to_num(0).clamp(0, 2**bits - 1).to(torch.uint8)
    parts = codes.unflatten(-1, (-1, 8 // bits))  # (…, bytes, codes a byte)
    shifts = torch.arange(0, 8, bits, device=x.device)
    return (parts.to(torch.int32) << shifts).sum(-1).to(torch.uint8), scale, low


def decode(codes: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    """What `encode` gave, as numbers `(…, size)` in the type of `scale`, each within half a scale of what it was."""
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    steps = (codes.unsqueeze(-1) >> shifts) & (2**bits - 1)  # (…, bytes, codes a byte)
    return steps.flatten(-2).to(scale.dtype) * scale.unsqueeze(-1) + low.unsqueeze(-1)
