"""Several models that decode as one: the mean of their log-probabilities."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from translator.cache import CacheSpec
from translator.engine.base import Decoding, Engine, MatrixScores, Scores
from translator.engine.scores import NativeScores


class EnsembleEngine:
    """See `Engine`. The members share a vocabulary; their sizes, and the engines that run them, may differ.

    A token's log-probability is the mean of the members', not made to add up to 1 again: a target's score is the mean
    of the scores that the members give it. Raises `ValueError` for no member or vocabularies of several sizes.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        sizes = sorted({engine.vocab_size for engine in engines})
        if len(sizes) != 1:
            raise ValueError(f"an ensemble needs members of one vocabulary, not of {sizes or 'none'}")
        self.engines = tuple(engines)

    @property
    def device(self) -> torch.device:
        """Where ids have to be, and scores are: the first member's."""
        return self.engines[0].device

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.engines[0].vocab_size

    @property
    def max_positions(self) -> int:
        """The shortest of the members'."""
        return min(engine.max_positions for engine in self.engines)

    @property
    def cache_kind(self) -> str:
        """The first member's."""
        return self.engines[0].cache_kind

    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> list[Any]:
        """Each member's memory of ids `(B, S)`."""
        return [
            engine.encode(source.to(engine.device), _on(key_padding_mask, engine.device)) for engine in self.engines
        ]

    def log_probs(self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Engine.log_probs`: the members' mean."""
        members = [
            engine.log_probs(source.to(engine.device), target.to(engine.device), _on(key_padding_mask, engine.device))
            for engine in self.engines
        ]
        return torch.stack([member.to(self.device) for member in members]).mean(dim=0)

    def start(self, memory: list[Any], key_padding_mask: Tensor | None, spec: CacheSpec) -> "EnsembleDecoding":
        """See `Engine.start`."""
        return EnsembleDecoding(
            [
                engine.start(own, _on(key_padding_mask, engine.device), spec)
                for engine, own in zip(self.engines, memory, strict=True)
            ],
            self.device,
        )


class EnsembleDecoding:
    """One decoding of each member, kept at the same tokens; see `Decoding`."""

    def __init__(self, decodings: Sequence[Decoding], device: torch.device) -> None:
        self.decodings = list(decodings)
        self.device = device

    @property
    def batch_size(self) -> int:
        """Sentences in the grid."""
        return self.decodings[0].batch_size

    @property
    def beams(self) -> int:
        """Rows a sentence."""
        return self.decodings[0].beams

    @torch.no_grad()
    def step(self, tokens: Tensor) -> MatrixScores:
        """See `Decoding.step`."""
        return mean_scores([decoding.step(tokens) for decoding in self.decodings], self.device)

    def reorder(self, beam: Tensor) -> None:
        """See `Decoding.reorder`."""
        for decoding in self.decodings:
            decoding.reorder(beam)

    def compact(self, keep: Tensor) -> None:
        """See `Decoding.compact`."""
        for decoding in self.decodings:
            decoding.compact(keep)

    def admit(self, slots: Sequence[int], newcomers: "EnsembleDecoding") -> None:
        """See `Decoding.admit`."""
        for mine, theirs in zip(self.decodings, newcomers.decodings, strict=True):
            mine.admit(slots, theirs)


def mean_scores(members: Sequence[Scores], device: torch.device) -> MatrixScores:
    """`Scores` of the mean log-probabilities: of logits and of normalisers apart, so that no member is normalised."""
    logits = members[0].logits().to(device)  # (rows, V)
    log_z = members[0].log_z.to(device)
    for member in members[1:]:
        logits = logits + member.logits().to(device)
        log_z = log_z + member.log_z.to(device)
    if len(members) > 1:
        logits, log_z = logits / len(members), log_z / len(members)
    if isinstance(members[0], NativeScores) and logits.dtype == torch.float32:  # no tie hangs on what others ask for
        return members[0].like(logits, log_z)
    return MatrixScores(logits, log_z)


def _on(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)
