"""How many tokens each row of a cache holds."""

import torch
from torch import Tensor


class Lengths:
    """One number while all rows agree, a tensor `(rows,)` on the host when not."""

    __slots__ = ("ragged", "rows", "uniform")

    def __init__(self, rows: int, uniform: int | None = 0, ragged: Tensor | None = None) -> None:
        self.rows = rows
        self.uniform = uniform
        self.ragged = ragged

    @classmethod
    def of(cls, values: Tensor) -> "Lengths":
        """From a tensor `(rows,)`; equal values take the fast path."""
        values = values.detach().to("cpu", torch.int64, copy=True).reshape(-1)  # the caller may write into theirs
        if not len(values) or bool((values == values[0]).all()):
            return cls(len(values), int(values[0]) if len(values) else 0)
        return cls(len(values), None, values)

    @property
    def longest(self) -> int:
        """The longest row's length."""
        return self.uniform if self.ragged is None else int(self.ragged.max())  # type: ignore[return-value]

    def tensor(self) -> Tensor:
        """`(rows,)`, int64, on the host."""
        if self.ragged is not None:
            return self.ragged
        return torch.full((self.rows,), self.uniform or 0, dtype=torch.int64)

    def advanced(self, by: int) -> "Lengths":
        """These lengths plus `by`."""
        if self.ragged is not None:
            return Lengths(self.rows, None, self.ragged + by)
        return Lengths(self.rows, (self.uniform or 0) + by)

    def positions(self, T: int, device: torch.device) -> Tensor:
        """Positions of the next T tokens of each row, `(rows, T)`, int64: what an embedding has to look up."""
        return self.slots(T, device)

    def slots(self, T: int, device: torch.device) -> Tensor:
        """Where the next T tokens of each row stand, `(rows, T)`, int64."""
        if self.uniform is not None:
            return torch.arange(self.uniform, self.uniform + T, device=device).expand(self.rows, T)
        return self.tensor().to(device).unsqueeze(1) + torch.arange(T, device=device)
