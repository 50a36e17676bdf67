"""Where a token stands, as a vector that its embedding gets added: one class a kind."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.errors import UserError


class LearnedPositions(nn.Module):
    """A vector of its own for each position, learned."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        # As large as the scaled token embeddings: positions that start small are learned many epochs late.
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, positions: Tensor) -> Tensor:
        """Positions of any shape → that shape with a last dimension of `width`."""
        return F.embedding(positions, self.weight)


class SinusoidalPositions(nn.Module):
    """A fixed table (Vaswani et al. 2017, section 3.5), which no checkpoint holds."""

    weight: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", position_table(length, width), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Positions of any shape → that shape with a last dimension of `width`."""
        return F.embedding(positions, self.weight)


class NoPositions(SinusoidalPositions):
    """Zeros: for layers that know where a token stands by themselves, as with rotary positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length, width)
        self.weight.zero_()


POSITIONS: dict[str, type[nn.Module]] = {
    "learned": LearnedPositions,
    "none": NoPositions,
    "sinusoidal": SinusoidalPositions,
}
"""Kinds by the name that `ModelConfig.positions` gives; each is made from the most positions and the width."""


def make_positions(kind: str, length: int, width: int) -> nn.Module:
    """A module from positions to vectors; raises `UserError` for an unknown kind."""
    if kind not in POSITIONS:
        raise UserError(f"model.positions = {kind!r}: unknown kind; known: {', '.join(sorted(POSITIONS))}")
    return POSITIONS[kind](length, width)


def position_table(length: int, width: int) -> Tensor:
    """Sinusoidal positions `(length, width)`: sines first, then cosines."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half) * (-torch.log(torch.tensor(10000.0)) / max(half - 1, 1)))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
