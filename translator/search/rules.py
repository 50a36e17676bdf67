"""The rules on tokens: ids that may not come next, and ids that must. They never edit a matrix of scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from translator.engine.base import Scores
from translator.search.base import NEVER
from translator.search.grid import Grid

NONE = -1
"""Fills up the lists of rows with fewer ids than others; never an id."""


def banned_ids(grid: Grid, device: torch.device) -> Tensor | None:
    """Ids `(rows, n)` that may not come next: suppressed ones, and those that would repeat an n-gram."""
    K = grid.shape[1]
    by_row: list[list[int]] = []
    for slot, member in enumerate(grid.members):
        suppressed = list(member.sentence.suppressed)
        n = member.config.no_repeat_ngram_size
        repeats = _repeats(grid.history[slot, :, : int(grid.lengths[slot])], n) if n else [[]] * K
        by_row += [suppressed + more for more in repeats]
    return _table(by_row, device)


def forced_ids(grid: Grid, device: torch.device) -> Tensor | None:
    """The id `(rows,)` that must come next, `NONE` where any may; None where no row is forced."""
    forced, any_forced = [], False
    for member, t in zip(grid.members, grid.lengths.tolist(), strict=True):
        prefix = member.sentence.prefix
        forced.append(prefix[t] if t < len(prefix) else NONE)
        any_forced = any_forced or t < len(prefix)
    return torch.tensor(forced).repeat_interleave(grid.shape[1]).to(device) if any_forced else None


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


def _repeats(history: Tensor, n: int) -> list[list[int]]:
    """For each row of `history` `(K, t)` the tokens that would end an n-gram it already holds."""
    K, t = history.shape
    found: list[list[int]] = [[] for _ in range(K)]
    if t < n:
        return found
    grams = history.unfold(1, n, 1)  # (K, t - n + 1, n)
    same = (grams[:, :, : n - 1] == history[:, None, t - n + 1 :]).all(dim=2)  # (K, t - n + 1)
    rows, places = same.nonzero(as_tuple=True)
    for row, token in zip(rows.tolist(), grams[rows, places, n - 1].tolist(), strict=True):
        found[row].append(token)
    return found


def _table(by_row: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    n = max((len(ids) for ids in by_row), default=0)
    if n == 0:
        return None
    return torch.tensor([[*ids, *[NONE] * (n - len(ids))] for ids in by_row]).to(device)  # (rows, n)
