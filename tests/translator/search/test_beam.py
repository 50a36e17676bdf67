"""Beam search: against brute force, and by hand on stub models."""

import math

import pytest

from tests.translator.search.models import (
    BEAM,
    EOS,
    NEVER,
    A,
    B,
    StubDecoding,
    V,
    assert_same,
    beam_by_hand,
    brute_force,
    every_search,
    log_probs,
    random_table,
    run,
    sentences,
)
from translator.config import DecodeConfig
from translator.search import rows_per_sentence, search

pytestmark = pytest.mark.numeric


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

    early, late = StubDecoding(table, 1, 2), StubDecoding(table, 1, 2)
    (stopped,) = search(early, sentences([20]), DecodeConfig(beam_size=2, early_stopping=True))
    (patient,) = search(late, sentences([20]), DecodeConfig(beam_size=2, early_stopping=False))
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
    stepper = StubDecoding(random_table(7, never_ends=True), 3, rows_per_sentence(config))
    search(stepper, sentences([1, 4, 2]), config)
    assert stepper.rows_at_step == [rows_per_sentence(config) * going for going in (3, 2, 1, 1)]
