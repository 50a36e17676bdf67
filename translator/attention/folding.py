"""Tokens folded into entries: of every `rate` tokens, a sum weighted by gates of their own makes one.

A light compression has two series of values and gates for each token (DeepSeek-V4 calls them a and b): an entry is made
of series b of its own window and series a of the window before, so that what stands at a border isn't torn apart. A
heavy one has a single series, and its windows don't overlap.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Folded(NamedTuple):
    """`entries` `(rows, most, width)`, zero from each row's number of new ones on, and what is held from here on."""

    entries: Tensor
    partial: Tensor
    previous: Tensor | None


def fold(tokens: Tensor, partial: Tensor, previous: Tensor | None, held: Tensor, rate: int) -> Folded:
    """The entries that T tokens complete.

    `tokens` `(rows, T, 2, series, width)` are values and gates; `partial` `(rows, rate - 1, 2, series, width)` those of
    the window that isn't full, from its first on; `previous` `(rows, rate, 2, width)` series a of the window before it,
    where there are two series; `held` `(rows,)` the tokens before these.
    """
    rows, T = tokens.shape[:2]
    filled = (held % rate).unsqueeze(1)  # (rows, 1)
    most = (rate - 1 + T) // rate
    line = tokens.new_zeros(rows, (most + 1) * rate, *tokens.shape[2:])  # a window more, for what is left over
    line[:, : rate - 1] = partial
    row = torch.arange(rows, device=tokens.device).unsqueeze(1)
    line[row, filled + torch.arange(T, device=tokens.device)] = tokens
    windows = line.unflatten(1, (most + 1, rate))  # (rows, most + 1, rate, 2, series, width)
    count, place = (filled + T) // rate, torch.arange(most, device=tokens.device)
    values, gates = windows[:, :most, :, :, -1].unbind(3)  # (rows, most, rate, width)
    if previous is not None:
        series_a = torch.cat([previous.unsqueeze(1), windows[:, :, :, :, 0]], dim=1)  # window j at j + 1
        before, gates_before = series_a[:, :most].unbind(3)
        none = (place == 0) & (held < rate).unsqueeze(1)  # no window stands before the first of all
        gates_before = gates_before.masked_fill(none[:, :, None, None], -torch.inf)
        values, gates = torch.cat([before, values], dim=2), torch.cat([gates_before, gates], dim=2)
        previous = series_a[row, count][:, 0]
    entries = (gates.softmax(dim=2) * values).sum(dim=2).masked_fill((place >= count).unsqueeze(2), 0)
    return Folded(entries, windows[row, count][:, 0, : rate - 1], previous)
