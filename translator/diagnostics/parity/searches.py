"""Whole searches, with a cache and without: the same tokens, the same scores, the same logits on the way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.diagnostics.parity.bench import Bench, Row
from translator.diagnostics.parity.tally import Tally, TokenDifference
from translator.engine import MatrixScores
from translator.search import Hypothesis, Sentence, search

Turn = tuple[list[Row], Tensor]
"""One step of a search: what each row held, and its logits `(rows, V)`."""


class WholePrefixDecoding:
    """A `Decoding` that recomputes every row from its first token, by one of `bench.paths`. Keeps all `turns`."""

    def __init__(self, bench: Bench, path: str, beams: int) -> None:
        self.bench = bench
        self.path = path
        self.batch_size = bench.sentences
        self.beams = beams
        self.rows: list[Row] = [(sentence, ()) for sentence in range(self.batch_size) for _ in range(beams)]
        self.turns: list[Turn] = []

    def step(self, tokens: Tensor) -> MatrixScores:
        """See `Decoding`."""
        self.rows = [(row[0], (*row[1], token)) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        logits = self.next_logits(tokens)
        self.turns.append((self.rows, logits))
        return MatrixScores(logits)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits `(rows, V)` after the rows as they are, `tokens` `(rows,)` already appended."""
        return self.bench.compute(self.path, self.rows, len(self.rows[0][1]) - 1)[:, 0]

    def reorder(self, beam: Tensor) -> None:
        """See `Decoding`."""
        self.rows = [self.rows[b * self.beams + k] for b, parents in enumerate(beam.tolist()) for k in parents]

    def compact(self, keep: Tensor) -> None:
        """See `Decoding`."""
        self.rows = [self.rows[b * self.beams + k] for b in keep.tolist() for k in range(self.beams)]
        self.batch_size = len(keep)

    def admit(self, slots: Sequence[int], newcomers: Any) -> None:
        """No search of a check lets sentences in."""
        raise NotImplementedError


class RecordedCacheDecoding(WholePrefixDecoding):
    """Steps with a cache, beside a record of its own of what each row holds."""

    def __init__(self, bench: Bench, kind: str, beams: int) -> None:
        super().__init__(bench, kind, beams)
        spec = CacheSpec.for_targets(kind, bench.longest, beams=beams)
        self.cache = bench.start(range(self.batch_size), spec)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """One step of the cache."""
        return self.bench.subject.cached(tokens.to(self.bench.subject.device).unsqueeze(1), self.cache)[:, -1]

    def reorder(self, beam: Tensor) -> None:
        """See `Decoding`."""
        super().reorder(beam)
        self.cache.reorder(beam)

    def compact(self, keep: Tensor) -> None:
        """See `Decoding`."""
        super().compact(keep)
        self.cache.compact(keep)


@dataclass(slots=True)
class Searched:
    """A search's hypotheses, best first for each sentence, and its steps. `found` is empty when it raised."""

    turns: list[Turn]
    found: list[list[Hypothesis]]


def run_search(decoding: WholePrefixDecoding) -> Searched:
    """Greedy for one beam, else beam search with as many hypotheses as beams, under limits that differ by sentence."""
    bench = decoding.bench
    config = DecodeConfig(beam_size=decoding.beams, n_best=decoding.beams)
    special = bench.special
    sentences = [
        Sentence(
            max_length=min(config.max_length(length), bench.longest),
            start_id=special.bos,
            end_id=special.eos,
            suppressed=(special.pad, special.bos),
        )
        for length in bench.subject.source_lengths
    ]
    return Searched(decoding.turns, search(decoding, sentences, config))


def reference_search(bench: Bench, path: str, beams: int) -> Searched:
    """The search by a path without a cache, remembered."""
    return bench.once(path, ("search", beams), lambda: run_search(WholePrefixDecoding(bench, path, beams)))


def compare_turns(tally: Tally, against: str, mine: Sequence[Turn], theirs: Sequence[Turn]) -> int | None:
    """Compares logits as long as both searches hold the same rows; the step at which they no longer do, if any."""
    for step, ((rows, logits), (expected_rows, expected)) in enumerate(zip(mine, theirs, strict=False)):
        if rows != expected_rows:
            return step
        tally.compare(against, logits, expected, given=False)
        if step == 0 and against in tally.worst:
            tally.count_searches(against, len({sentence for sentence, _ in rows}))
    return None


def compare_results(
    tally: Tally, against: str, mine: Searched, theirs: Searched, *, parted: int | None, first_line: int
) -> None:
    """Compares tokens and scores of every hypothesis and notes the first difference in tokens.

    `parted` is what `compare_turns` gave; `first_line` is the line number of the first sentence.
    """
    first = True
    for line, (found, wanted) in enumerate(zip(mine.found, theirs.found, strict=True), first_line):
        for rank, (ours, expected) in enumerate(zip_longest(found, wanted)):
            if ours is not None and expected is not None and ours.tokens == expected.tokens:
                tally.compare_scores(ours.score, expected.score)
            elif first:
                first = False
                if parted is None:  # the same rows to the end: they differ in what they took for complete
                    gap = abs(ours.score - expected.score) if ours and expected else math.nan
                else:
                    gap = choice_gap(mine.turns[parted][0], theirs.turns, parted)
                tokens, wanted_tokens = ours.tokens if ours else [], expected.tokens if expected else []
                pairs = enumerate(zip_longest(tokens, wanted_tokens))
                position, (token, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
                steps = position + 1 if parted is None else parted
                tally.differences.append(TokenDifference(against, line, rank, position, token, other, gap, steps))


def choice_gap(rows: Sequence[Row], theirs: Sequence[Turn], step: int) -> float:
    """How far apart the rows two searches went on with at `step` were, rank by rank, by the reference's
    log-probabilities, in nats.

    Both held the same rows until then, so the reference knows every prefix. Ranked totals move no further than the
    totals themselves, so an honest tie gives a gap within the tolerance. NaN when they only differ in sentences done.
    """
    gaps = []
    for sentence in dict.fromkeys(row[0] for row in rows):
        ours, others = ([row for row in side if row[0] == sentence] for side in (rows, theirs[step][0]))
        pairs = [(a, b) for a, b in zip(ours, others, strict=False) if a != b]
        gaps += [abs(_log_prob(a, theirs) - _log_prob(b, theirs)) for a, b in pairs]
    return max(gaps, default=math.nan)


def _log_prob(row: Row, turns: Sequence[Turn]) -> float:
    sentence, tokens = row
    total = 0.0
    for step in range(len(tokens) - 1):
        rows, logits = turns[step]
        own = logits[rows.index((sentence, tokens[: step + 1]))].double()
        total += float(own.log_softmax(dim=0)[tokens[step + 1]])
    return total
