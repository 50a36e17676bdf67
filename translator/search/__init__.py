"""Searches: who calls whom.

`Driver` (`driver.py`) steps a `Decoding` of any engine. At each step it asks `rules.py` which ids are banned or forced
in each row, a policy (`greedy.py`, `beam.py`, `sampling.py`, registered in `policy.py`) which token each row takes and
which row it continues, writes that into its `Grid` (`grid.py`: the sentences, their tokens so far), and gives one
`Event` a sentence. `search` is the same for one batch, from first to last.

Ids are whatever `Scores` calls an id: nothing here takes them for columns of a matrix but `Scores.logits`, which only
sampling without top-k asks for. A shortlist of the vocabulary is another `Scores`: over the shorter matrix, its `top`
maps columns to ids, `at` ids to columns, and `logits` has -inf at ids outside the list.
"""

from translator.search import beam, greedy, sampling  # noqa: F401 - each registers its policy
from translator.search.base import Hypothesis, Sentence, check_finite
from translator.search.driver import Driver, Event, Grown, Start, search, starter
from translator.search.grid import Grid
from translator.search.policy import POLICIES, Choice, Policy, each_by_itself, policy_of, register, rows_per_sentence
from translator.search.rules import candidates

__all__ = [
    "POLICIES",
    "Choice",
    "Driver",
    "Event",
    "Grid",
    "Grown",
    "Hypothesis",
    "Policy",
    "Sentence",
    "Start",
    "candidates",
    "check_finite",
    "each_by_itself",
    "policy_of",
    "register",
    "rows_per_sentence",
    "search",
    "starter",
]
