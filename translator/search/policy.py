"""What a search decides at each step, and what searches there are. A new one is one file with `@register` here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.engine.base import Scores
from translator.errors import UserError
from translator.search.grid import Grid, Member


@dataclass(slots=True)
class Choice:
    """What a policy chose, for each sentence and each of its rows: `tokens`, `totals`, `live` (rows that go on).

    `parents` are the rows that they go on from, within their sentence; None: each goes on from itself. `ended` are
    targets that the end token completes now: slot, the row it follows, log-probability.
    """

    tokens: list[list[int]]
    totals: list[list[float]]
    live: list[list[bool]]
    ended: list[tuple[int, int, float]]
    parents: list[list[int]] | None = None


class Policy(ABC):
    """Says, from `Scores`, which token each row takes and which row it continues. Without state: the grid has it all.

    The best few of V are found on the device of the scores; they cross to the host in one transfer (`on_host`), where
    a few numbers are ranked in less time than an operator takes to start.
    """

    name: ClassVar[str]
    alike: ClassVar[bool] = False
    """Whether only the first of a sentence's rows is continued by its first step, since all would do the same."""

    @classmethod
    @abstractmethod
    def rows(cls, config: DecodeConfig) -> int:
        """Rows of the grid that each sentence needs, K."""

    @abstractmethod
    def choose(self, scores: Scores, grid: Grid, banned: Tensor | None, forced: Tensor | None) -> Choice:
        """One step. `banned` `(rows, n)` and `forced` `(rows,)` are the rules, see `translator.search.rules`."""

    def is_done(self, member: Member, best_live: float) -> bool:
        """Whether to stop although rows of total log-probability `best_live` and less could go on."""
        return False


POLICIES: dict[str, type[Policy]] = {}
"""Searches by name: settings, command line and tests read it from here."""

Registered = TypeVar("Registered", bound=type[Policy])


def register(policy: Registered) -> Registered:
    """Class decorator: makes a policy known under its `name`."""
    POLICIES[policy.name] = policy
    return policy


def policy_of(config: DecodeConfig) -> type[Policy]:
    """The policy that `config` asks for; raises `UserError` for an unknown name."""
    name = config.search_name
    if name not in POLICIES:
        raise UserError(f"unknown search {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def rows_per_sentence(config: DecodeConfig) -> int:
    """How many rows of the grid each sentence needs."""
    return policy_of(config).rows(config)


def each_by_itself(grid: Grid, tokens: Tensor, log_probs: Tensor) -> Choice:
    """The choice where every row takes a token of its own, `tokens` and `log_probs` one a row, on any device."""
    taken, gained = on_host(tokens.view(-1), log_probs.view(-1))
    K, choice = grid.rows, Choice([], [], [], [])
    for slot, (member, totals, live) in enumerate(zip(grid.members, grid.totals, grid.live, strict=True)):
        end_id, first = member.sentence.end_id, slot * K
        mine = taken[first : first + K]
        totals = [total + gained[first + row] if live[row] else total for row, total in enumerate(totals)]
        if end_id in mine:
            choice.ended += [(slot, row, totals[row]) for row in range(K) if live[row] and mine[row] == end_id]
            live = [alive and token != end_id for alive, token in zip(live, mine, strict=True)]
        choice.tokens.append(mine)
        choice.totals.append(totals)
        choice.live.append(live)
    return choice


def on_host(*parts: Tensor) -> list[list[Any]]:
    """Ids and values of one shape as lists, brought to the host together."""
    if parts[0].device.type == "cpu":
        return [part.tolist() for part in parts]
    packed = torch.stack([part.double() for part in parts]).cpu()  # an id has fewer than fp64's 53 bits
    return [mine.to(part.dtype).tolist() for mine, part in zip(packed, parts, strict=True)]
