"""Greedy, beam and sampling search, all through the same step."""

from translator.config import DecodeConfig
from translator.search.base import CachedStepper, Hypothesis, Sentences, Stepper
from translator.search.beam import beam_search
from translator.search.single import greedy_search, greedy_steps, sample

__all__ = [
    "CachedStepper",
    "Hypothesis",
    "Sentences",
    "Stepper",
    "beam_search",
    "greedy_search",
    "greedy_steps",
    "rows_per_sentence",
    "sample",
    "search",
]


def rows_per_sentence(config: DecodeConfig) -> int:
    """How many rows of the grid each sentence needs."""
    return config.n_best if config.sampling else config.beam_size


def search(stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, best first, by the search that `config` asks for."""
    if config.sampling:
        return sample(stepper, sentences, config)
    return (
        greedy_search(stepper, sentences, config) if config.beam_size == 1 else beam_search(stepper, sentences, config)
    )
