"""Greedy search: the most probable token at each step."""

from torch import Tensor

from translator.config import DecodeConfig
from translator.engine.base import Scores
from translator.search.grid import Grid
from translator.search.policy import Choice, Policy, each_by_itself, register
from translator.search.rules import candidates


@register
class Greedy(Policy):
    """One hypothesis a sentence."""

    name = "greedy"

    @classmethod
    def rows(cls, config: DecodeConfig) -> int:
        """One."""
        return 1

    def choose(self, scores: Scores, grid: Grid, banned: Tensor | None, forced: Tensor | None) -> Choice:
        """See `Policy.choose`."""
        values, ids = candidates(scores, 1, banned, forced)  # (B, 1)
        return each_by_itself(grid, ids, values)
