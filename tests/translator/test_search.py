"""Searches: against brute force, by hand on stub models, and the same with a cache and without."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_model64
from translator.cache import CACHE_KINDS
from translator.config import DecodeConfig
from translator.model import TranslationModel
from translator.padding import pad, padding
from translator.search import (
    CachedStepper,
    Hypothesis,
    Sentences,
    beam_search,
    greedy_search,
    greedy_steps,
    rows_per_sentence,
    sample,
    search,
)
from translator.search.sampling import Sampler, gumbel

pytestmark = pytest.mark.numeric
PAD, BOS, EOS, A, B, C = range(6)
V = 6
NEVER = float("-inf")
GREEDY = DecodeConfig(beam_size=1)
SAMPLING = DecodeConfig(sampling=True, n_best=3)
BEAM = DecodeConfig(beam_size=3, n_best=3)
every_search = pytest.mark.parametrize("config", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])

# (sentence, tokens so far) -> logits of the next token
Table = Callable[[int, tuple[int, ...]], Sequence[float]]


class StubStepper:
    """A model given as a table, which keeps what each row holds as plain tuples."""

    def __init__(self, table: Table, batch_size: int = 1, beams: int = 1) -> None:
        self.table = table
        self.beams = beams
        self.rows: list[tuple[int, tuple[int, ...]]] = [(b, ()) for b in range(batch_size) for _ in range(beams)]
        self.rows_at_step: list[int] = []

    @property
    def batch_size(self) -> int:
        return len(self.rows) // self.beams

    def step(self, tokens: Tensor) -> Tensor:
        self.rows = [(b, (*held, token)) for (b, held), token in zip(self.rows, tokens.tolist(), strict=True)]
        self.rows_at_step.append(len(self.rows))
        assert all(held[0] == BOS for _, held in self.rows), "a target starts with the start token"
        return torch.tensor([self.table(b, held[1:]) for b, held in self.rows], dtype=torch.float64)

    def reorder(self, beam: Tensor) -> None:
        assert beam.shape == (self.batch_size, self.beams)
        self.rows = [self.rows[b * self.beams + k] for b, parents in enumerate(beam.tolist()) for k in parents]

    def compact(self, keep: Tensor) -> None:
        self.rows = [self.rows[b * self.beams + k] for b in keep.tolist() for k in range(self.beams)]


class WholePrefixStepper(StubStepper):
    """A `TranslationModel` without a cache: the whole prefix at every step, each row with its own unpadded source."""

    def __init__(self, model: TranslationModel, sources: list[list[int]], beams: int) -> None:
        super().__init__(lambda b, held: self.logits(b, held), len(sources), beams)
        self.model = model
        self.memories = [model.encode(torch.tensor([source])) for source in sources]

    @torch.no_grad()
    def logits(self, sentence: int, held: tuple[int, ...]) -> list[float]:
        hidden = self.model.decode(torch.tensor([[2, *held]]), self.memories[sentence])
        return self.model.logits(hidden[0, -1]).tolist()

    def step(self, tokens: Tensor) -> Tensor:
        self.rows = [(b, (*held, token)) for (b, held), token in zip(self.rows, tokens.tolist(), strict=True)]
        return torch.tensor([self.table(b, held[1:]) for b, held in self.rows], dtype=torch.float64)


def sentences(max_lengths: list[int], **options) -> Sentences:
    return Sentences(max_lengths, bos_id=BOS, eos_id=EOS, pad_id=PAD, **options)


def run(table: Table, config: DecodeConfig, max_lengths: list[int], **options) -> list[list[Hypothesis]]:
    stepper = StubStepper(table, len(max_lengths), rows_per_sentence(config))
    return search(stepper, sentences(max_lengths, **options), config)


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


# -- beam search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_what_brute_force_finds(seed, alpha, early_stopping):
    table = random_table(seed)
    config = DecodeConfig(beam_size=130, n_best=125, length_penalty=alpha, early_stopping=early_stopping)
    found = run(table, config, [4, 2, 4])
    for sentence, longest in enumerate([4, 2, 4]):
        assert_same(found[sentence], brute_force(table, sentence, longest, alpha)[:125])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_without_early_stopping_the_best_is_not_missed_by_ending_soon(seed, alpha):
    table = random_table(seed, spread=1.0)
    config = DecodeConfig(beam_size=81, n_best=1, length_penalty=alpha, early_stopping=False)
    assert_same(run(table, config, [4])[0], brute_force(table, 0, 4, alpha)[:1])


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


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("beams", [2, 3, 5])
def test_a_narrow_beam_keeps_to_its_rule(beams, alpha, early_stopping):
    for seed in range(12):
        table, limits = random_table(seed, spread=1.0), [7, 4, 7]
        config = DecodeConfig(
            beam_size=beams, n_best=min(beams, 3), length_penalty=alpha, early_stopping=early_stopping
        )
        for sentence, found in enumerate(run(table, config, limits)):
            assert_same(found, beam_by_hand(table, sentence, limits[sentence], config))


def end_or_go_on(sentence: int, held: tuple[int, ...]) -> list[float]:
    """The end token at once has log-probability -1.0; A, B, end has -1.2 in all."""
    certain = math.log(1 - math.exp(-0.3))
    return {
        (): [NEVER, NEVER, -1.0, -0.6, math.log(1 - math.exp(-1.0) - math.exp(-0.6)), NEVER],
        (A,): [NEVER, NEVER, NEVER, certain, -0.3, NEVER],
        (A, B): [NEVER, NEVER, -0.3, certain, NEVER, NEVER],
    }.get(held, [NEVER, NEVER, math.log(0.1), math.log(0.9), NEVER, NEVER])


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize(("alpha", "best", "score"), [(0.0, [EOS], -1.0), (1.0, [A, B, EOS], -1.2 / 3)])
def test_an_early_end_does_not_stop_a_longer_target_that_wins(alpha, best, score, early_stopping):
    config = DecodeConfig(beam_size=2, length_penalty=alpha, early_stopping=early_stopping)
    (found,) = run(end_or_go_on, config, [4])
    assert found[0].tokens == best
    assert found[0].score == pytest.approx(score)


def test_early_stopping_ends_with_beam_size_complete_and_not_before():
    """Two bad short targets complete at once; a long good one is still under way."""

    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        if held == ():
            return [NEVER, NEVER, math.log(0.3), math.log(0.7), NEVER, NEVER]
        if len(held) == 1:
            return [NEVER, NEVER, math.log(0.3), math.log(0.7), NEVER, NEVER]
        return [NEVER, NEVER, math.log(0.02 if len(held) < 7 else 0.98), math.log(0.98), NEVER, NEVER]

    early, late = (
        StubStepper(table, 1, 2),
        StubStepper(table, 1, 2),
    )
    (stopped,) = beam_search(early, sentences([20]), DecodeConfig(beam_size=2, early_stopping=True))
    (patient,) = beam_search(late, sentences([20]), DecodeConfig(beam_size=2, early_stopping=False))
    assert len(early.rows_at_step) == 2
    assert stopped[0].tokens == [A, EOS]
    assert patient[0].tokens == [A] * 7 + [EOS]
    assert len(late.rows_at_step) < 20, "nothing under way could win any more"


@every_search
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.0])
def test_the_score_is_log_prob_over_length_with_the_end_token(config, alpha):
    table = random_table(4)
    config = DecodeConfig(
        beam_size=config.beam_size, n_best=config.n_best, sampling=config.sampling, length_penalty=alpha
    )
    for sentence, found in enumerate(run(table, config, [5, 2, 5])):
        assert found
        for hypothesis in found:
            total = sum(log_probs(table, sentence, hypothesis.tokens))
            assert hypothesis.finished == (hypothesis.tokens[-1] == EOS)
            assert hypothesis.log_prob == pytest.approx(total)
            assert hypothesis.score == pytest.approx(total / len(hypothesis.tokens) ** alpha)


@every_search
@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_model_that_never_ends_gives_exactly_the_longest_length(config, longest):
    for found in run(random_table(1, never_ends=True), config, [longest, longest]):
        assert len(found) == config.n_best or (config is BEAM and found)
        for hypothesis in found:
            assert len(hypothesis.tokens) == longest and not hypothesis.finished


@every_search
def test_each_sentence_has_its_own_longest_length(config):
    limits = [1, 6, 3, 6]
    for limit, found in zip(limits, run(random_table(2, never_ends=True), config, limits), strict=True):
        assert {len(hypothesis.tokens) for hypothesis in found} == {limit}


@pytest.mark.parametrize("beams", [V - 1, V, 10, 40])
def test_a_beam_as_large_as_the_vocabulary_or_larger(beams):
    table = random_table(3)
    config = DecodeConfig(beam_size=beams, n_best=min(beams, 3), early_stopping=False)
    found = run(table, config, [3, 1])
    assert_same(found[1], brute_force(table, 1, 1, 1.0)[: len(found[1])])
    assert len(found[0]) == 3
    for hypothesis in found[0]:
        assert hypothesis.log_prob == pytest.approx(sum(log_probs(table, 0, hypothesis.tokens)))
    if beams == 40:
        assert_same(found[0], brute_force(table, 0, 3, 1.0)[:3])


@pytest.mark.parametrize("seed", range(5))
def test_n_best_is_sorted_distinct_and_complete_before_cut(seed):
    config = DecodeConfig(beam_size=8, n_best=8)
    for found in run(random_table(seed, spread=0.3), config, [3, 4, 2]):
        assert len({tuple(h.tokens) for h in found}) == len(found) == 8
        assert found == sorted(found, key=lambda h: (not h.finished, -h.score))
        assert not any(EOS in h.tokens[:-1] for h in found)


def test_a_complete_target_ranks_above_a_cut_one_that_scores_better():
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [NEVER, NEVER, math.log(0.1), math.log(0.9), NEVER, NEVER]

    (found,) = run(table, DecodeConfig(beam_size=3, n_best=3, length_penalty=0.0, early_stopping=False), [3])
    assert [h.finished for h in found] == [True, True, True] or not found[-1].finished
    cut = [h for h in found if not h.finished]
    assert found[0].finished
    (all_found,) = run(table, DecodeConfig(beam_size=6, n_best=6, length_penalty=0.0, early_stopping=False), [3])
    cut = [h for h in all_found if not h.finished]
    assert [h.tokens for h in cut] == [[A, A, A]] and all_found[-1] is cut[0]
    assert cut[0].score > all_found[0].score


@every_search
def test_a_batch_gives_each_sentence_what_it_gets_alone(config):
    table, limits = random_table(7, spread=1.0), [2, 9, 5, 9, 1]
    together = run(table, config, limits)
    for sentence, limit in enumerate(limits):
        alone = run(lambda _, held, s=sentence: table(s, held), config, [limit], keys=[(sentence,)])
        assert_same(together[sentence], alone[0])


@every_search
def test_sentences_that_are_done_leave_the_grid(config):
    stepper = StubStepper(random_table(7, never_ends=True), 3, rows_per_sentence(config))
    search(stepper, sentences([1, 4, 2]), config)
    assert stepper.rows_at_step == [rows_per_sentence(config) * going for going in (3, 2, 1, 1)]


# -- what every search keeps to ---------------------------------------------------------------------------------------


@every_search
def test_padding_and_start_are_never_generated(config):
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [50.0, 60.0, *random_table(1)(sentence, held)[2:]]

    for found in run(table, config, [6, 3, 6]):
        for hypothesis in found:
            assert not {PAD, BOS} & set(hypothesis.tokens)
            assert math.isfinite(hypothesis.log_prob)


@every_search
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_n_gram_comes_twice(config, n):
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        near = [float(place == 3 + len(held) % 2 * (sentence % 2)) * 3 for place in range(V)]
        near[EOS] = -4.0
        return [logit + noise for logit, noise in zip(near, random_table(5, 0.5)(sentence, held), strict=True)]

    def grams(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

    settings = {"beam_size": config.beam_size, "n_best": config.n_best, "sampling": config.sampling}
    limits = [20, 20, 20]
    free = run(table, DecodeConfig(**settings), limits)
    assert any(len(set(grams(h.tokens))) < len(grams(h.tokens)) for found in free for h in found), "a vain test"
    for found in run(table, DecodeConfig(**settings, no_repeat_ngram_size=n), limits):
        assert found
        for hypothesis in found:
            assert len(set(grams(hypothesis.tokens))) == len(grams(hypothesis.tokens))
            assert math.isfinite(hypothesis.log_prob)


def test_no_repeat_bans_only_what_would_repeat():
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [NEVER, NEVER, -9.0, 2.0, 1.0, 0.0]

    (found,) = run(table, DecodeConfig(beam_size=1, no_repeat_ngram_size=2), [9])
    # A A, then A may not follow A: B; after B, A is new; after A neither A nor B; …
    assert found[0].tokens == [A, A, B, A, C, A, EOS]


@every_search
def test_a_forced_prefix_begins_the_target_and_counts_in_its_score(config):
    table = random_table(9)
    prefixes = [[C, C, B], [], [A], [B, C, A, A, A, B, C]]
    found = run(table, config, [8, 8, 2, 8], prefixes=prefixes)
    for sentence, (prefix, hypotheses) in enumerate(zip(prefixes, found, strict=True)):
        assert hypotheses
        for hypothesis in hypotheses:
            assert hypothesis.tokens[: len(prefix)] == prefix
            assert hypothesis.log_prob == pytest.approx(sum(log_probs(table, sentence, hypothesis.tokens)))
    free = run(table, config, [8, 8, 2, 8])
    assert_same(found[1], free[1])


@every_search
def test_after_a_prefix_the_search_goes_on_as_from_there(config):
    table, prefix = random_table(11), (C, B)

    def rest_table(sentence: int, held: tuple[int, ...]) -> Sequence[float]:
        return table(sentence, prefix + held)

    if config is SAMPLING:
        config = DecodeConfig(sampling=True, n_best=1, temperature=0.001)
    (forced,) = run(table, config, [6], prefixes=[list(prefix)])
    settings = {"length_penalty": 0.0, "beam_size": config.beam_size, "n_best": config.n_best}
    (plain,) = run(table, DecodeConfig(**settings), [6], prefixes=[list(prefix)])
    (rest,) = run(rest_table, DecodeConfig(**settings), [4])
    assert [h.tokens for h in plain] == [[*prefix, *h.tokens] for h in rest]
    assert forced[0].tokens[:2] == list(prefix)


@every_search
def test_a_prefix_as_long_as_the_limit_or_longer_leaves_room_for_one_token(config):
    for length in (3, 4, 7):
        prefix = ([A, B, C] * 3)[:length]
        (found,) = run(random_table(3, never_ends=True), config, [3], prefixes=[prefix])
        for hypothesis in found:
            assert hypothesis.tokens[:length] == prefix
            assert len(hypothesis.tokens) == max(length + 1, 3)


@every_search
def test_a_prefix_may_repeat_and_may_be_what_the_model_would_never_say(config):
    settings = {"beam_size": config.beam_size, "n_best": config.n_best, "sampling": config.sampling}
    prefix = [A, A, A, PAD, BOS]
    (found,) = run(random_table(3), DecodeConfig(**settings, no_repeat_ngram_size=1), [8], prefixes=[prefix])
    for hypothesis in found:
        assert hypothesis.tokens[:5] == prefix
        assert A not in hypothesis.tokens[5:]


@every_search
def test_a_long_target_is_added_up_without_rounding(config):
    """In fp32 the total of 300 unlikely tokens is off by more than scores are compared with.

    One token has nearly all the mass, so that the log-probabilities of the others are exact on any machine.
    """

    class Single(StubStepper):
        def step(self, tokens: Tensor) -> Tensor:
            return super().step(tokens).float()

    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [-90.0, -90.0, -81.0, -80.0004, -82.0, 0.0]

    prefix = [A] * 300
    stepper = Single(table, 1, rows_per_sentence(config))
    (found,) = search(stepper, sentences([303], prefixes=[prefix]), config)
    for hypothesis in found:
        logits = [torch.tensor(table(0, tuple(hypothesis.tokens[:t]))) for t in range(len(hypothesis.tokens))]
        exact = math.fsum(
            float(row.log_softmax(0)[token]) for row, token in zip(logits, hypothesis.tokens, strict=True)
        )
        assert exact < -24_000 and hypothesis.log_prob == pytest.approx(exact, abs=0.01)


# -- greedy and sampling ---------------------------------------------------------------------------------------------


def test_greedy_takes_the_most_probable_token_each_time():
    table = random_table(12)
    for sentence, (found,) in enumerate(run(table, GREEDY, [6, 6, 6, 1])):
        for t, token in enumerate(found.tokens):
            allowed = list(table(sentence, tuple(found.tokens[:t])))
            allowed[PAD] = allowed[BOS] = NEVER
            assert token == allowed.index(max(allowed))


def test_greedy_steps_show_each_token_and_each_end():
    table, limits = random_table(12), [6, 1, 4]
    whole = greedy_search(StubStepper(table, 3), sentences(limits), GREEDY)
    ended = {}
    for t, (history, finished) in enumerate(greedy_steps(StubStepper(table, 3), sentences(limits), GREEDY), 1):
        assert history.shape[1] == t
        ended.update(finished)
    assert_same([ended[index] for index in range(3)], [hypotheses[0] for hypotheses in whole])


def three_ways(sentence: int, held: tuple[int, ...]) -> list[float]:
    return [5.0, 5.0, math.log(0.1), math.log(0.5), math.log(0.3), math.log(0.1)]


def frequencies(config: DecodeConfig, draws: int = 4000) -> list[float]:
    found = sample(StubStepper(three_ways, draws), sentences([1] * draws), config)
    counts = torch.bincount(torch.tensor([h[0].tokens[0] for h in found]), minlength=V)
    return (counts / draws).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.5, 0.3, 0.1]),
        ({"temperature": 0.5}, [0.01 / 0.36, 0.25 / 0.36, 0.09 / 0.36, 0.01 / 0.36]),
        ({"temperature": 1000.0}, [0.25, 0.25, 0.25, 0.25]),
        ({"temperature": 0.001}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 5 / 8, 3 / 8, 0]),
        ({"top_k": 100}, [0.1, 0.5, 0.3, 0.1]),
        ({"top_p": 0.45}, [0, 1, 0, 0]),
        ({"top_p": 0.79}, [0, 5 / 8, 3 / 8, 0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.69}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_sampling_follows_the_distribution_it_was_given(settings, expected):
    got = frequencies(DecodeConfig(sampling=True, **settings))
    assert got[PAD] == got[BOS] == 0
    assert got[EOS:] == pytest.approx(expected, abs=0.03)
    assert [share == 0 for share in got[EOS:]] == [share == 0 for share in expected]


def test_sampling_reports_the_models_own_log_prob():
    config = DecodeConfig(sampling=True, temperature=3.0, top_k=3)
    for (found,) in sample(StubStepper(three_ways, 20), sentences([2] * 20), config):
        assert found.log_prob == pytest.approx(sum(log_probs(three_ways, 0, found.tokens)))


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.001}], ids=str)
def test_sampling_without_choice_is_greedy(settings):
    table, limits = random_table(13), [6, 2, 6]
    sampled = run(table, DecodeConfig(sampling=True, n_best=2, **settings), limits)
    greedy = run(table, GREEDY, limits)
    assert tokens_of(sampled) == [hypotheses * 2 for hypotheses in tokens_of(greedy)]


def test_a_seed_gives_the_same_samples_and_another_seed_others():
    table = random_table(14, spread=0.5)

    def with_seed(seed: int) -> list[list[list[int]]]:
        return tokens_of(run(table, DecodeConfig(sampling=True, n_best=4, seed=seed), [8, 8]))

    torch.manual_seed(1)
    first = with_seed(5)
    torch.manual_seed(2)
    assert with_seed(5) == first
    assert with_seed(6) != first
    assert len({str(tokens) for tokens in first[0]}) > 1, "the samples of one sentence are drawn apart"


def test_a_key_draws_the_same_in_any_company_and_order():
    table = random_table(15, spread=0.5)
    config = DecodeConfig(sampling=True, n_best=2)

    def drawn(order: list[int], limit: int) -> dict[int, list[list[int]]]:
        found = run(lambda b, held: table(order[b], held), config, [limit] * len(order), keys=[(key,) for key in order])
        return dict(zip(order, tokens_of(found), strict=True))

    together = drawn([3, 0, 8, 5], 7)
    assert drawn([8, 5, 3, 0], 7) == together
    for key in together:
        assert drawn([key], 7)[key] == together[key]
    mates = run(lambda b, held: table([3, 1][b], held), config, [7, 60], keys=[(3,), (1,)])
    assert tokens_of(mates)[0] == together[3], "a longer mate changes nothing"


def test_noise_is_the_same_on_every_machine_and_apart_for_all_that_it_depends_on():
    tokens = torch.arange(4).expand(2, 4)
    noise = gumbel(torch.tensor([5, -7]), 3, tokens)
    expected = [
        [1.3748689486679635, 0.39948857671149196, -0.8776381670796058, 0.2551384532217431],
        [3.9650609355003814, 2.3927741882294704, 0.0643214128364173, 0.30497806145864076],
    ]
    assert noise.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]
    assert torch.equal(gumbel(torch.tensor([5, -7]), 3, tokens.flip(1)), noise.flip(1)), "a function of the token"
    many = [noise, gumbel(torch.tensor([5, -7]), 4, tokens), gumbel(torch.tensor([6, 7]), 3, tokens)]
    assert len(torch.cat(many).unique()) == 24

    def seeds(seed: int, keys: list[tuple[int, ...]]) -> Tensor:
        return Sampler(sentences([1] * len(keys), keys=keys), DecodeConfig(sampling=True, seed=seed), 3).seeds

    apart = [seeds(seed, [(1, 0), (0, 1), (10,), (1,)]) for seed in (0, 1, -1, 2**70)]
    assert len(torch.stack(apart).unique()) == 4 * 4 * 3
    assert seeds(0, [(1, 0)]).tolist()[0][0] == 2333347468544467636


def test_noise_has_the_distribution_it_should_have():
    """Uniform once its own distribution function is applied, whether rows, steps or tokens are counted on."""
    across_tokens = gumbel(torch.tensor([1]), 0, torch.arange(20_000).unsqueeze(0))
    across_rows = gumbel(torch.arange(20_000), 0, torch.zeros(20_000, 1, dtype=torch.int64))
    across_steps = torch.cat([gumbel(torch.tensor([1]), t, torch.zeros(1, 1, dtype=torch.int64)) for t in range(2000)])
    for noise in (across_tokens, across_rows, across_steps):
        uniform = (-(-noise.flatten()).exp()).exp()
        counts = torch.histc(uniform, 20, 0, 1)
        expected = len(uniform) / 20
        assert float(((counts - expected) ** 2 / expected).sum()) < 45, "chi-square, 19 degrees of freedom: p < 0.001"
        ordered = torch.stack([uniform[:-1], uniform[1:]])
        assert abs(float(torch.corrcoef(ordered)[0, 1])) < 4 / len(uniform) ** 0.5


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 500}, {"top_p": 0.9}], ids=str)
def test_rounding_in_the_logits_moves_hardly_any_sampled_token(settings):
    """A nearly flat distribution, where any cumulative sum or sorted order would pass the change on to most draws."""
    generator = torch.Generator().manual_seed(3)
    rows, vocabulary, noise = 2000, 1000, 1e-4
    log_probs = (0.1 * torch.randn(rows, vocabulary, generator=generator)).log_softmax(1)
    shaken = log_probs + noise * (2 * torch.rand(rows, vocabulary, generator=generator) - 1)
    sampler = Sampler(sentences([1] * rows), DecodeConfig(sampling=True, **settings), 1)
    before, after = (sampler(scores, list(range(rows)), 0) for scores in (log_probs, shaken))
    # The best two of perturbed scores are apart by an exponential variable of mean `temperature`; truncation has its
    # own near-ties, whose tokens are seldom the ones drawn.
    assert int((before != after).sum()) <= 8
    assert len(before.unique()) > vocabulary / 4


@pytest.mark.parametrize("top_k", [0, 300])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_k):
    """Rows whose nuclei are one token, some, and nearly all."""
    generator = torch.Generator().manual_seed(5)
    spread = torch.tensor([30.0, 8.0, 2.0, 0.1, 0.0001]).unsqueeze(1)
    log_probs = (spread * torch.randn(5, 3000, generator=generator, dtype=torch.float64)).log_softmax(1)
    sampler = Sampler(sentences([1] * 5), DecodeConfig(sampling=True, top_p=0.8, top_k=top_k), 1)
    perturbed, tokens = sampler.perturbed(log_probs.clone(), list(range(5)), 0)
    sizes = []
    for row, (scores, ids) in enumerate(zip(perturbed, tokens, strict=True)):
        kept = set(ids[scores > NEVER].tolist())
        ((scores,), (ids,)) = sampler.perturbed(log_probs[row : row + 1].clone(), [row], 0)
        assert set(ids[scores > NEVER].tolist()) == kept, "alone as together"
        ranked = log_probs[row].sort(descending=True)
        probs = (ranked.values[:top_k] if top_k else ranked.values).softmax(0).tolist()
        wanted, mass = 0, 0.0
        while mass < 0.8:
            mass += probs[wanted]
            wanted += 1
        assert kept == set(ranked.indices[:wanted].tolist())
        sizes.append(wanted)
    assert sizes[0] == 1 and sizes == sorted(sizes) and sizes[-1] > (200 if top_k else 2000)


# -- the model behind the step ----------------------------------------------------------------------------------------

SOURCES = [
    [21, 3],
    [300, 301, 302, 288, 270, 3],
    [*range(262, 300), 3],
    [400, 410, 3],
    [3],
]
LIMITS = [14, 22, 40, 16, 12]
CONFIGS = {
    "greedy": DecodeConfig(beam_size=1),
    "beam 3": DecodeConfig(beam_size=3, n_best=3),
    "beam 4 to the end": DecodeConfig(beam_size=4, n_best=4, early_stopping=False, length_penalty=0.6),
    "sampling": DecodeConfig(sampling=True, n_best=3),
    "no repeats": DecodeConfig(beam_size=3, n_best=3, no_repeat_ngram_size=2),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


def of_model(max_lengths: list[int], **options) -> Sentences:
    return Sentences(max_lengths, bos_id=2, eos_id=3, pad_id=0, **options)


@torch.no_grad()
def cached(model: TranslationModel, sources: list[list[int]], config: DecodeConfig, kind: str) -> CachedStepper:
    hidden = padding([len(source) for source in sources])
    memory = model.encode(pad(sources, 0), hidden)
    return CachedStepper(model, model.start(memory, hidden, kind, 64, beams=rows_per_sentence(config)))


@every_config
@pytest.mark.parametrize("kind", sorted(CACHE_KINDS))
def test_a_search_with_a_cache_equals_one_without(config, kind):
    """Tokens and scores, for beams that swap places and sentences that finish at different steps."""
    model = tiny_model64()
    found = search(cached(model, SOURCES, config, kind), of_model(LIMITS), config)
    whole = WholePrefixStepper(model, SOURCES, rows_per_sentence(config))
    expected = search(whole, of_model(LIMITS), config)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert len({len(hypotheses[0].tokens) for hypotheses in found}) > 1, "they should end at different steps"


@every_config
@pytest.mark.parametrize("order", [[0, 2], [2, 0], [0, 1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_in_a_batch_as_alone(config, order):
    """A short sentence is not changed by a long one beside it, nor three by one another."""
    model = tiny_model64()
    together = search(
        cached(model, [SOURCES[i] for i in order], config, "dynamic"),
        of_model([LIMITS[i] for i in order], keys=[(i,) for i in order]),
        config,
    )
    for index, found in zip(order, together, strict=True):
        stepper = cached(model, [SOURCES[index]], config, "dynamic")
        (alone,) = search(stepper, of_model([LIMITS[index]], keys=[(index,)]), config)
        assert_same(found, alone)


def test_an_output_on_the_way_is_not_changed_by_later_steps():
    """Every n-best target of a long search is what the model gives it, not a mixture of beams."""
    model, config = tiny_model64(), DecodeConfig(beam_size=6, n_best=6, early_stopping=False)
    found = search(cached(model, SOURCES, config, "static"), of_model(LIMITS), config)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        for hypothesis in hypotheses:
            ids = torch.tensor([hypothesis.tokens])
            with torch.no_grad():
                logits = model(torch.tensor([source]), torch.cat([torch.tensor([[2]]), ids[:, :-1]], dim=1))
            total = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).sum()
            assert hypothesis.log_prob == pytest.approx(float(total), abs=1e-9)
