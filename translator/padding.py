"""Rows of ids to tensors, their padding marked from lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """`(B, longest)` int64, filled with `pad_id`."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows])


def padding(lengths: Sequence[int]) -> Tensor:
    """`(B, longest)` bool, True = padding: from lengths, never from ids, so that no id can pass for padding."""
    return torch.arange(max(lengths)).unsqueeze(0) >= torch.tensor(lengths).unsqueeze(1)
