"""Attention that doesn't reach back to the first token: which keys a query still sees, and a kernel that sees no more.

A cache's own mask already says so where the state keeps to the band; in a pass over whole sequences the kernel does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from translator.attention.kernels import Kernel
from translator.attention.masks import restrict


class Band(NamedTuple):
    """A query sees itself and the `size - 1` positions before it; `chunked`, only those of them in its own chunk of
    `size` positions, counted from the first token."""

    size: int
    chunked: bool = False

    def first(self, position: Any) -> Any:
        """The first position, an int or a tensor of them, that a query at `position` sees; below 0 for all of them."""
        return position // self.size * self.size if self.chunked else position - self.size + 1

    def mask(self, T: int, device: torch.device) -> Tensor | None:
        """`(T, T)` over a whole sequence, causal, True = visible; None where the causal mask alone is the same."""
        if self.size >= T:
            return None
        places = torch.arange(T, device=device)
        queries = places.unsqueeze(1)
        return (places <= queries) & (places >= self.first(queries))


class BandedKernel:
    """A kernel for passes over whole sequences that hides what lies outside a band, beside what a mask hides."""

    def __init__(self, kernel: Kernel, band: Band) -> None:
        self.kernel = kernel
        self.band = band

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `translator.attention.kernels.attend`; as many queries as keys, which stand at the same positions."""
        seen = self.band.mask(q.shape[2], q.device)
        if seen is None:
            return self.kernel(q, k, v, mask, is_causal, dropout)
        if mask is not None:
            seen = restrict(mask, seen, False, q.shape[2])
        return self.kernel(q, k, v, seen, False, dropout)
