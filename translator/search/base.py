"""What every search shares: the sentences it was given and the hypotheses it finds."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.engine.base import NEVER
from translator.errors import UserError

__all__ = ["NEVER", "Hypothesis", "Sentence", "check_finite", "normalised", "ranked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One sentence to decode, with all that is its own: rows of one grid may differ in every point.

    `max_length` counts the end token. `start_id` comes before the first token, `end_id` completes a target and may be
    the same; `suppressed` are never chosen. `prefix` are target tokens that the choice is overridden with, step by
    step. Each id of `exactly` is chosen as often as it says, and no target ends before. With `may_loop`, as for a
    source that repeats itself, `max_in_a_row` doesn't count. `key` makes sampling independent of batch mates, by
    default the sentence's number. `config`, by default the search's, has to ask for the same search with as many rows.
    """

    max_length: int
    start_id: int
    end_id: int
    suppressed: Sequence[int] = ()
    prefix: Sequence[int] = ()
    exactly: Mapping[int, int] = dataclasses.field(default_factory=dict)
    may_loop: bool = False
    key: tuple[int, ...] | None = None
    config: DecodeConfig | None = None

    @property
    def limit(self) -> int:
        """The longest target: a prefix as long as `max_length` still leaves room for one token of the model's own."""
        return max(self.max_length, len(self.prefix) + 1)


@dataclass(slots=True)
class Hypothesis:
    """One decoded target. `tokens` end with the end token when `finished`; `score = log_prob / len(tokens) ** α`."""

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


def normalised(log_prob: float, length: int, length_penalty: float) -> float:
    """`log_prob / length ** length_penalty` (Wu et al. 2016 without their constant); `length` counts the end token."""
    return log_prob / max(length, 1) ** length_penalty


def ranked(found: list[Hypothesis]) -> list[Hypothesis]:
    """Best first; those cut at their longest length below the complete ones."""
    return sorted(found, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))


def check_finite(values: Tensor) -> None:
    """Raises `UserError` when logits, log-probabilities or a normaliser hold something else than numbers."""
    # A NaN or an infinity shows in the sum, and numbers of at most fp32's range can't make one in fp64. A few numbers
    # are added up before an operator has started.
    few = values.device.type == "cpu" and values.dim() == 1 and len(values) <= 1024
    if not math.isfinite(sum(values.tolist()) if few else values.sum(dtype=torch.float64)):
        raise UserError("the model gives NaN instead of probabilities: its weights are damaged, or too large for fp32")
