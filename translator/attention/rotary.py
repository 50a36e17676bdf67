"""Rotary positions (Su et al. 2021, RoFormer): pairs of numbers turned by angles that grow with the position."""

import torch
from torch import Tensor

BASE = 10_000.0
"""How much slower the last pair turns than the first, about."""


def rotated(x: Tensor, positions: Tensor, *, base: float = BASE, back: bool = False) -> Tensor:
    """`x` `(rows, H, T, width)` turned to its `positions` `(rows or 1, T)`, or `back` from them; `width` is even.

    Two vectors turned so have a product that depends on how far apart they stand, and not on where. Angles are worked
    out in fp32 at least, whatever `x` is in.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angles = positions.to(x.device, wide)[:, None, :, None] * rates  # (rows or 1, 1, T, half)
    cos, sin = angles.cos(), -angles.sin() if back else angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
