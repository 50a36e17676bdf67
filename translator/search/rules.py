"""The rules on tokens: ids that may not come next, and ids that must. They never edit a matrix of scores."""

import torch
from torch import Tensor

from translator.engine.base import Scores
from translator.search.base import NEVER
from translator.search.grid import Grid

NONE = -1
"""Fills up the lists of rows with fewer ids than others; never an id."""


def banned_ids(grid: Grid, device: torch.device) -> Tensor | None:
    """Ids `(rows, n)` that may not come next: suppressed ones, and those that would repeat an n-gram."""
    if grid.once("repeats are banned", lambda: any(member.config.no_repeat_ngram_size for member in grid.members)):
        return _banned(grid, device)
    return grid.once("banned", lambda: _banned(grid, device))


def forced_ids(grid: Grid, device: torch.device) -> Tensor | None:
    """The id `(rows,)` that must come next, `NONE` where any may; None where no row is forced."""
    longest = grid.once("longest prefix", lambda: max(len(member.sentence.prefix) for member in grid.members))
    if not longest:
        return None
    forced = []
    for member in grid.members:
        t, prefix = len(member.trail), member.sentence.prefix
        forced.append(prefix[t] if t < len(prefix) else NONE)
    if all(token == NONE for token in forced):
        return None
    return torch.tensor(forced).repeat_interleave(grid.rows).to(device)


def candidates(scores: Scores, k: int, banned: Tensor | None, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Scores.top` under the rules: log-probabilities and ids `(rows, k)`, best first.

    A forced row has its one id first and -inf behind it, whatever is banned.
    """
    values, ids = scores.top(k, banned)  # (rows, k)
    if forced is None:
        return values, ids
    must = (forced != NONE).unsqueeze(1)  # (rows, 1)
    only = forced.clamp(min=0).unsqueeze(1)  # (rows, 1)
    rest = torch.full_like(values[:, 1:], NEVER)
    return (
        torch.where(must, torch.cat([scores.at(only), rest], dim=1), values),
        torch.where(must, only, ids),
    )


def _banned(grid: Grid, device: torch.device) -> Tensor | None:
    by_row: list[list[int]] = []
    for member in grid.members:
        suppressed, n = list(member.sentence.suppressed), member.config.no_repeat_ngram_size
        repeats = [_repeats(held, n) for held in member.all_held(grid.rows)] if n else [[]] * grid.rows
        by_row += [suppressed + more for more in repeats]
    n = max(len(ids) for ids in by_row)
    if n == 0:
        return None
    flat = [token for ids in by_row for token in (*ids, *[NONE] * (n - len(ids)))]
    return torch.tensor(flat).view(len(by_row), n).to(device)


def _repeats(held: list[int], n: int) -> list[int]:
    """The tokens that would end an n-gram which the tokens `held` already have."""
    if n == 1 or len(held) < n:
        return held if n == 1 else []
    *before, last = held
    begun = held[len(held) - n + 1 :]
    return [held[i + 1] for i, token in enumerate(before) if token == last and held[i - n + 2 : i + 1] == begun]
