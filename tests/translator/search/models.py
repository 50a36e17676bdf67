"""Models given as tables, and what every test of a search compares with."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.model import TranslationModel
from translator.search import Hypothesis, Sentence, rows_per_sentence, search

PAD, BOS, EOS, A, B, C = range(6)
V = 6
NEVER = float("-inf")
GREEDY = DecodeConfig(beam_size=1)
SAMPLING = DecodeConfig(sampling=True, n_best=3)
BEAM = DecodeConfig(beam_size=3, n_best=3)
every_search = pytest.mark.parametrize("config", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])

# (sentence, tokens so far) -> logits of the next token
Table = Callable[[int, tuple[int, ...]], Sequence[float]]


class StubDecoding:
    """A model given as a table, which keeps what each row holds as plain tuples."""

    def __init__(self, table: Table, sentences: Sequence[int] | int = 1, beams: int = 1, slots: int = 0) -> None:
        self.table = table
        self.beams = beams
        numbers = list(range(sentences)) if isinstance(sentences, int) else list(sentences)
        numbers += [-1] * (slots - len(numbers))  # empty slots
        self.rows: list[tuple[int, tuple[int, ...]]] = [(number, ()) for number in numbers for _ in range(beams)]
        self.rows_at_step: list[int] = []

    @property
    def batch_size(self) -> int:
        return len(self.rows) // self.beams

    def step(self, tokens: Tensor) -> MatrixScores:
        assert all(number >= 0 for number, _ in self.rows), "a step with an empty slot"
        self.rows = [(b, (*held, token)) for (b, held), token in zip(self.rows, tokens.tolist(), strict=True)]
        self.rows_at_step.append(len(self.rows))
        return MatrixScores(self.logits([(b, held[1:]) for b, held in self.rows]))

    def logits(self, rows: list[tuple[int, tuple[int, ...]]]) -> Tensor:
        return torch.tensor([self.table(b, held) for b, held in rows], dtype=torch.float64)

    def reorder(self, beam: Tensor) -> None:
        assert beam.shape == (self.batch_size, self.beams)
        self.rows = [self.rows[b * self.beams + k] for b, parents in enumerate(beam.tolist()) for k in parents]

    def compact(self, keep: Tensor) -> None:
        self.rows = [self.rows[b * self.beams + k] for b in keep.tolist() for k in range(self.beams)]

    def admit(self, slots: Sequence[int], newcomers: "StubDecoding") -> None:
        assert newcomers.beams == self.beams and newcomers.batch_size == len(slots) == len(set(slots))
        for index, slot in enumerate(slots):
            theirs = newcomers.rows[index * self.beams : (index + 1) * self.beams]
            self.rows[slot * self.beams : (slot + 1) * self.beams] = theirs


class WholePrefixDecoding(StubDecoding):
    """A `TranslationModel` without a cache: the whole prefix at every step, each row with its own unpadded source."""

    def __init__(self, model: TranslationModel, sources: list[list[int]], beams: int) -> None:
        super().__init__(self.row_logits, len(sources), beams)
        self.model = model
        self.memories = [model.encode(torch.tensor([source])) for source in sources]

    @torch.no_grad()
    def row_logits(self, sentence: int, held: tuple[int, ...]) -> list[float]:
        hidden = self.model.decode(torch.tensor([[2, *held]]), self.memories[sentence])
        return self.model.logits(hidden[0, -1]).tolist()


def sentences(max_lengths: Sequence[int], *, prefixes=(), keys=(), **settings) -> list[Sentence]:
    """One sentence of the tables for each longest length."""
    settings = {"start_id": BOS, "end_id": EOS, "suppressed": (PAD, BOS)} | settings
    return [
        Sentence(
            max_length=most,
            prefix=prefixes[index] if prefixes else (),
            key=keys[index] if keys else None,
            **settings,
        )
        for index, most in enumerate(max_lengths)
    ]


def run(table: Table, config: DecodeConfig, max_lengths: list[int], **options) -> list[list[Hypothesis]]:
    decoding = StubDecoding(table, len(max_lengths), rows_per_sentence(config))
    return search(decoding, sentences(max_lengths, **options), config)


def tokens_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


@lru_cache
def random_table(seed: int, spread: float = 2.0, never_ends: bool = False) -> Table:
    """Logits that depend on the sentence and on everything decoded so far."""

    @cache
    def table(sentence: int, held: tuple[int, ...]) -> tuple[float, ...]:
        digest = hashlib.blake2b(repr((seed, sentence, held)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        logits = torch.randn(V, generator=generator, dtype=torch.float64) * spread
        if never_ends:
            logits[EOS] = NEVER
        return tuple(logits.tolist())

    return table


def log_probs(table: Table, sentence: int, tokens: Sequence[int]) -> list[float]:
    steps = [torch.tensor(table(sentence, tuple(tokens[:t])), dtype=torch.float64) for t in range(len(tokens))]
    return [float(logits.log_softmax(0)[token]) for logits, token in zip(steps, tokens, strict=True)]


def log_probs_after(table: Table, sentence: int, tokens: Sequence[int]) -> list[float]:
    return torch.tensor(table(sentence, tuple(tokens)), dtype=torch.float64).log_softmax(0).tolist()


def brute_force(table: Table, sentence: int, longest: int, alpha: float) -> list[Hypothesis]:
    """Every target there is, complete ones first, best first."""
    found = []
    for length in range(longest + 1):
        for words in itertools.product([A, B, C], repeat=length):
            if length < longest:
                tokens, finished = [*words, EOS], True
            else:
                tokens, finished = list(words), False
            total = sum(log_probs(table, sentence, tokens))
            found.append(Hypothesis(tokens, total, total / len(tokens) ** alpha, finished))
    return sorted(found, key=lambda h: (not h.finished, -h.score))


def assert_same(found: list[Hypothesis], expected: list[Hypothesis], tolerance: float = 1e-9) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.finished for h in found] == [h.finished for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=tolerance)
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=tolerance)


def beam_by_hand(table: Table, sentence: int, longest: int, config: DecodeConfig) -> list[Hypothesis]:
    """The rule in plain Python: of the 2 K best continuations, ends among the first K complete, K others go on."""
    K, alpha = config.beam_size, config.length_penalty
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[Hypothesis] = []
    for length in range(1, longest + 1):
        grown = []
        for total, tokens in live:
            last = log_probs_after(table, sentence, tokens)
            grown += [(total + last[token], [*tokens, token]) for token in (EOS, A, B, C)]
        best = sorted(grown, key=lambda entry: -entry[0])[: 2 * K]
        for total, tokens in best[:K]:
            if tokens[-1] == EOS:
                found.append(Hypothesis(tokens, total, total / length**alpha, True))
        live = [entry for entry in best if entry[1][-1] != EOS][:K]
        found.sort(key=lambda h: -h.score)
        if config.early_stopping and len(found) >= K:
            break
        worst_kept = found[config.n_best - 1].score if len(found) >= config.n_best else NEVER
        if not config.early_stopping and length < longest and live[0][0] / longest**alpha <= worst_kept:
            break
        if length == longest:
            cut = [Hypothesis(tokens, total, total / length**alpha, False) for total, tokens in live]
            found += sorted(cut, key=lambda h: -h.score)
    return found[: config.n_best]
