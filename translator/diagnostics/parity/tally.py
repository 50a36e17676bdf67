"""What a check found: how much was compared, how far apart it was, and where tokens first differed.

Positions of given tokens and searches are counted apart: how many steps two searches take together before they part, or
end, hangs on rounding where tokens are nearly equal, and so differs between machines.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first place where a search with a cache chose otherwise than one without.

    `line` counts from 1, `rank` (in the n-best list) and `position` from 0; a token is None where a hypothesis had
    ended or was missing. `gap` is how far apart the two choices were by the reference, in nats of the `steps`
    log-probabilities summed; NaN where there was nothing to set against each other.
    """

    against: str
    line: int
    rank: int
    position: int
    token: int | None
    expected: int | None
    gap: float
    steps: int


@dataclass(slots=True)
class Tally:
    """Running totals of one check. `worst`, `counted` and `searched` are by reference path.

    `counted` are positions of given tokens, `searched` sentences whose searches were compared; `scale` is the largest
    |logit| seen.
    """

    worst: dict[str, float] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    scale: float = 0.0
    score_difference: float = 0.0
    differences: list[TokenDifference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    searched: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Operations that a layer's state can't do and refused by name: left out, and no fault."""
    skipped: str = ""
    """Why there was nothing to compare, where that is no fault."""

    @property
    def positions(self) -> int:
        """Logit vectors of given tokens compared with every one of the references."""
        return min(self.counted.values(), default=0)

    @property
    def searches(self) -> int:
        """Sentences searched, step by step beside every one of the references."""
        return min(self.searched.values(), default=0)

    @property
    def largest(self) -> float:
        """The largest |Δlogit| against any reference; infinite where one was not a number."""
        return max(self.worst.values(), default=0.0)

    def compare(self, against: str, actual: Tensor, expected: Tensor, *, given: bool = True) -> None:
        """Compares logits `(…, V)`, and counts them where their tokens were `given` and not a search's choice.

        A tensor compared with itself proves nothing and isn't counted.
        """
        if actual.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr():
            return
        if actual.shape != expected.shape:
            raise ValueError(f"logits {tuple(actual.shape)} against {tuple(expected.shape)}")
        expected = expected.double()
        difference = float((actual.double() - expected).abs().max())
        self.worst[against] = max(self.worst.get(against, 0.0), math.inf if math.isnan(difference) else difference)
        if given:
            self.counted[against] = self.counted.get(against, 0) + expected.shape[:-1].numel()
        self.scale = max(self.scale, float(expected.abs().max()))

    def count_searches(self, against: str, sentences: int) -> None:
        """Counts sentences whose search was compared at its first step at least."""
        self.searched[against] = self.searched.get(against, 0) + sentences

    def compare_scores(self, actual: float, expected: float) -> None:
        """Counts two scores of the same tokens, in nats."""
        difference = abs(actual - expected)
        self.score_difference = max(self.score_difference, math.inf if math.isnan(difference) else difference)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Absolute for float64, relative to the largest |logit| for float32; other types are reported, not judged."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finished check: what was compared in which type, and the verdict. `kind` is "-" where no cache is involved."""

    dtype: torch.dtype
    kind: str
    name: str
    tally: Tally

    @property
    def limit(self) -> float:
        """The largest |Δlogit| that passes; infinite where the type is only reported."""
        if self.dtype not in TOLERANCES:
            return math.inf
        return TOLERANCES[self.dtype] * (1.0 if self.dtype == torch.float64 else self.tally.scale)

    def is_tie(self, difference: TokenDifference) -> bool:
        """Whether the two choices were too close to call.

        A search depends on its logits alone, so where those agreed up to the choice, only a tie can part two runs.
        """
        return self.tally.largest <= self.limit and not difference.gap > self.limit * difference.steps

    @property
    def verdict(self) -> str:
        """`"pass"`, `"FAIL"`, `"tie"` (tokens differ, but at a tie), `"reported"` (a type that isn't judged) or
        `"skipped"` (nothing to compare with)."""
        tally = self.tally
        if tally.skipped:
            return "skipped"
        if tally.errors or not (tally.positions or tally.searches):
            return "FAIL"
        if self.dtype not in TOLERANCES:
            return "reported"
        if max(tally.largest, tally.score_difference) > self.limit:
            return "FAIL"
        if all(map(self.is_tie, tally.differences)):
            return "tie" if tally.differences else "pass"
        return "FAIL"
