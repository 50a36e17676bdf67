"""The rules on tokens: ids that may not come next, and ids that must. They never edit a matrix of scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from translator.engine.base import Scores
from translator.search.base import NEVER
from translator.search.grid import Grid, Member

NONE = -1
"""Fills up the lists of rows with fewer ids than others; never an id."""


LONGEST_LOOP = 4
"""Tokens of the longest n-gram that `max_in_a_row` is about."""


def banned_ids(grid: Grid, device: torch.device) -> Tensor | None:
    """Ids `(rows, n)` that may not come next: suppressed ones, those that would repeat an n-gram, or come too often."""
    bans_change = grid.once("bans hang on the rows", lambda: any(map(_hang_on_rows, grid.members)))
    # A loop is rare: what is banned mostly stays the same from step to step.
    if bans_change or any(ids for member in grid.members for ids in _loop_ids(member, grid.rows)):
        return _as_tensor(_banned(grid), device)
    return grid.once("banned", lambda: _as_tensor(_suppressed(grid), device))


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


def loop_ids(held: list[int], most: int) -> list[int]:
    """The tokens that would make an n-gram of up to `LONGEST_LOOP` tokens stand at the end of `held` a time too often.

    That is more than `most` times in a row.
    """
    ids = []
    for n in range(1, LONGEST_LOOP + 1):
        end = held[len(held) - n * (most + 1) + 1 :] if len(held) >= n * (most + 1) - 1 else []
        if end and end[n:] == end[:-n]:
            ids.append(held[-n])
    return ids


def has_loop(ids: Sequence[int], most: int) -> bool:
    """Whether an n-gram of up to `LONGEST_LOOP` tokens stands in `ids` more than `most` times in a row."""
    held = list(ids)
    return any(held[end] in loop_ids(held[:end], most) for end in range(most, len(held)))


def _loop_ids(member: Member, rows: int) -> list[list[int]]:
    most = member.config.max_in_a_row
    if not most or member.sentence.may_loop:
        return [[]] * rows
    return [loop_ids(held, most) for held in member.all_held(rows)]


def _hang_on_rows(member: Member) -> bool:
    return bool(member.config.no_repeat_ngram_size or member.sentence.exactly)


def _suppressed(grid: Grid) -> list[list[int]]:
    return [list(member.sentence.suppressed) for member in grid.members for _ in range(grid.rows)]


def _banned(grid: Grid) -> list[list[int]]:
    by_row = _suppressed(grid)
    for slot, member in enumerate(grid.members):
        rows = by_row[slot * grid.rows : (slot + 1) * grid.rows]
        for ids, more in zip(rows, _loop_ids(member, grid.rows), strict=True):
            ids += more
        if not _hang_on_rows(member):
            continue
        n, sentence = member.config.no_repeat_ngram_size, member.sentence
        for ids, held in zip(rows, member.all_held(grid.rows), strict=True):
            ids += _repeats(held, n) if n else []
            counts = {token: held.count(token) for token in sentence.exactly}
            ids += [token for token, most in sentence.exactly.items() if counts[token] >= most]
            if any(counts[token] < least for token, least in sentence.exactly.items()):
                ids.append(sentence.end_id)
    return by_row


def _as_tensor(by_row: list[list[int]], device: torch.device) -> Tensor | None:
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
