"""What every search shares: the step it drives, the sentences it was given, the rules on tokens, the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from translator.cache import DecoderCache
from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.errors import UserError
from translator.model import TranslationModel

NEVER = float("-inf")


class Stepper(Protocol):
    """A decoder between two steps, over a grid of `batch_size` sentences by `beams` rows.

    A cached model is one; a model that recomputes the whole prefix at every step is another, and any search must give
    the same with both.
    """

    @property
    def batch_size(self) -> int:
        """Sentences in the grid, B."""

    @property
    def beams(self) -> int:
        """Rows a sentence, K."""

    def step(self, tokens: Tensor) -> Tensor | MatrixScores:
        """Logits `(rows, V)` of the token after `tokens` `(rows,)`, which are appended to each row."""

    def reorder(self, beam: Tensor) -> None:
        """Row `(b, k)` continues from row `(b, beam[b, k])`; `beam` `(B, K)` on the host."""

    def compact(self, keep: Tensor) -> None:
        """Goes on with the sentences `keep` `(B',)` only."""


class CachedStepper:
    """A `TranslationModel` with its cache."""

    def __init__(self, model: TranslationModel, cache: DecoderCache) -> None:
        self.model = model
        self.cache = cache

    @property
    def batch_size(self) -> int:
        """Sentences in the grid."""
        return self.cache.batch_size

    @property
    def beams(self) -> int:
        """Rows a sentence."""
        return self.cache.beams

    def step(self, tokens: Tensor) -> Tensor:
        """One step for every row; see `Stepper`."""
        hidden = self.model.decode(tokens.to(self.cache.device).unsqueeze(1), self.cache)
        return self.model.logits(hidden[:, -1])

    def reorder(self, beam: Tensor) -> None:
        """See `Stepper`."""
        self.cache.reorder(beam)

    def compact(self, keep: Tensor) -> None:
        """See `Stepper`."""
        self.cache.compact(keep)


@dataclass(slots=True)
class Sentences:
    """What a search has to decode: for each sentence its longest target, a forced prefix and a key for sampling.

    `max_lengths` count the end token. `prefixes` are target tokens that the choice is overridden with, step by step.
    `keys` make sampling independent of batch mates; they default to the sentence's index.
    """

    max_lengths: list[int]
    bos_id: int
    eos_id: int
    pad_id: int
    prefixes: Sequence[Sequence[int]] = ()
    keys: Sequence[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if self.prefixes:
            # A prefix as long as the limit still leaves room for one token of the model's own.
            longest = zip(self.max_lengths, self.prefixes, strict=True)
            self.max_lengths = [max(limit, len(prefix) + 1) for limit, prefix in longest]


@dataclass(slots=True)
class Hypothesis:
    """One decoded target. `tokens` end with the end token when `finished`; `score = log_prob / len(tokens) ** α`."""

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


@dataclass(slots=True)
class Rules:
    """Which tokens may come next: never padding or the start token, no repeated n-gram, the forced prefix above all."""

    sentences: Sentences
    config: DecodeConfig
    active: list[int] = field(default_factory=list)
    """Original index of each sentence still in the grid."""

    def __post_init__(self) -> None:
        self.active = list(range(len(self.sentences.max_lengths)))

    def apply(self, log_probs: Tensor, history: Tensor) -> Tensor:
        """`log_probs` `(rows, V)` with -inf where a token may not follow `history` `(rows, t)`; changed in place."""
        forced = self._forced(log_probs, history.shape[1])
        log_probs[:, [self.sentences.pad_id, self.sentences.bos_id]] = NEVER
        self._ban_repeats(log_probs, history)
        for rows, token, values in forced:
            log_probs[rows] = NEVER
            log_probs[rows, token] = values
        return log_probs

    def _forced(self, log_probs: Tensor, t: int) -> list[tuple[slice, int, Tensor]]:
        """The rows whose prefix has a token at `t`, that token and its log-probability in each of them."""
        forced = []
        beams = log_probs.shape[0] // max(len(self.active), 1)
        for slot, index in enumerate(self.active if self.sentences.prefixes else ()):
            prefix = self.sentences.prefixes[index]
            if t < len(prefix):
                rows = slice(slot * beams, (slot + 1) * beams)
                forced.append((rows, prefix[t], log_probs[rows, prefix[t]].clone()))
        return forced

    def _ban_repeats(self, log_probs: Tensor, history: Tensor) -> None:
        n, t = self.config.no_repeat_ngram_size, history.shape[1]
        if n == 0 or t < n:
            return
        grams = history.unfold(1, n, 1)  # (rows, t - n + 1, n)
        same = (grams[:, :, : n - 1] == history[:, None, t - n + 1 :]).all(dim=2)
        rows, places = same.nonzero(as_tuple=True)
        log_probs[rows, grams[rows, places, n - 1]] = NEVER

    def limits(self) -> list[int]:
        """The longest target of each sentence still in the grid."""
        return [self.sentences.max_lengths[index] for index in self.active]


def normalised(log_prob: float, length: int, length_penalty: float) -> float:
    """`log_prob / length ** length_penalty` (Wu et al. 2016 without their constant); `length` counts the end token."""
    return log_prob / max(length, 1) ** length_penalty


def next_log_probs(stepper: Stepper, tokens: Tensor) -> Tensor:
    """One step: log-probabilities `(rows, V)` in fp32 or better, on the host, where searches do their bookkeeping.

    Raises `UserError` when the model gives something else than numbers.
    """
    scores = stepper.step(tokens)
    logits = scores if isinstance(scores, Tensor) else scores.logits()
    if logits.dtype != torch.float64:
        logits = logits.float()
    log_probs = logits.log_softmax(dim=-1).cpu()
    check_finite(log_probs[:, 0])  # one NaN or infinity in a row of logits makes all of the row NaN
    return log_probs


def check_finite(values: Tensor) -> None:
    """Raises `UserError` when logits or log-probabilities hold NaN."""
    if bool(values.isnan().any()):
        raise UserError("the model gives NaN instead of probabilities: its weights are damaged, or too large for fp32")
