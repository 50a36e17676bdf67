"""What every search keeps to: bans, prefixes, limits, exact sums."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.translator.search.models import (
    BOS,
    EOS,
    NEVER,
    PAD,
    SAMPLING,
    A,
    B,
    C,
    StubDecoding,
    V,
    assert_same,
    every_search,
    log_probs,
    random_table,
    run,
    sentences,
)
from translator.config import DecodeConfig
from translator.search import rows_per_sentence, search
from translator.search.rules import has_loop

pytestmark = pytest.mark.numeric


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

    class Single(StubDecoding):
        def logits(self, rows: list[tuple[int, tuple[int, ...]]]) -> Tensor:
            return super().logits(rows).float()

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
        assert exact < -24_000 and hypothesis.log_prob == pytest.approx(exact, abs=1e-6)


@every_search
@pytest.mark.parametrize("period", [1, 2, 3])
def test_nothing_comes_more_often_in_a_row_than_it_may_unless_the_source_does(config, period):
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        loop = [float(place == 3 + len(held) % period) * 15 for place in range(V)]
        loop[EOS] = -4.0
        return [logit + noise for logit, noise in zip(loop, random_table(5, 0.5)(sentence, held), strict=True)]

    settings = {"beam_size": config.beam_size, "n_best": config.n_best, "sampling": config.sampling}
    limits = [24, 24, 24]
    free = run(table, DecodeConfig(**settings), limits)
    assert any(has_loop(h.tokens, 3) for found in free for h in found), "a vain test"
    for found in run(table, DecodeConfig(**settings, max_in_a_row=3), limits):
        for hypothesis in found:
            assert not has_loop(hypothesis.tokens, 3)
            assert math.isfinite(hypothesis.log_prob)
    assert run(table, DecodeConfig(**settings, max_in_a_row=3), limits, may_loop=True) == free


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([7, 7, 7], False),
        ([7, 7, 7, 7], True),
        ([1, 7, 8, 7, 8, 7, 8, 7, 8, 2], True),
        ([1, 7, 8, 7, 8, 7, 8, 7, 2], False),
        ([1, 2, 3, 4] * 4, True),
        ([1, 2, 3, 4, 5] * 4, False),
        ([], False),
    ],
)
def test_a_loop_is_more_than_three_in_a_row(ids, loops):
    assert has_loop(ids, 3) is loops


@every_search
@pytest.mark.parametrize("exactly", [{A: 2, B: 0}, {A: 1, C: 1}, {B: 3}])
def test_each_id_is_chosen_exactly_as_often_as_it_has_to_be(config, exactly):
    settings = {"beam_size": config.beam_size, "n_best": config.n_best, "sampling": config.sampling}
    limits = [60, 60, 60, 60]
    free = run(random_table(9), DecodeConfig(**settings), limits)
    assert any(h.tokens.count(token) != n for found in free for h in found for token, n in exactly.items())
    for found in run(random_table(9), DecodeConfig(**settings), limits, exactly=exactly):
        assert any(hypothesis.finished for hypothesis in found), "a vain test"
        for hypothesis in found:
            for token, n in exactly.items():
                assert hypothesis.tokens.count(token) <= n
                assert hypothesis.tokens.count(token) == n or not hypothesis.finished
