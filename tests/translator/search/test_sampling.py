"""Greedy search and sampling."""

import math

import pytest
import torch
from torch import Tensor

from tests.translator.search.models import (
    BOS,
    EOS,
    GREEDY,
    NEVER,
    PAD,
    StubDecoding,
    V,
    log_probs,
    random_table,
    run,
    sentences,
    tokens_of,
)
from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.search import search
from translator.search.grid import Grid, Member
from translator.search.sampling import Draws, drawn, gumbel, perturbed_all, perturbed_likely

pytestmark = pytest.mark.numeric


def test_greedy_takes_the_most_probable_token_each_time():
    table = random_table(12)
    for sentence, (found,) in enumerate(run(table, GREEDY, [6, 6, 6, 1])):
        for t, token in enumerate(found.tokens):
            allowed = list(table(sentence, tuple(found.tokens[:t])))
            allowed[PAD] = allowed[BOS] = NEVER
            assert token == allowed.index(max(allowed))


def three_ways(sentence: int, held: tuple[int, ...]) -> list[float]:
    return [5.0, 5.0, math.log(0.1), math.log(0.5), math.log(0.3), math.log(0.1)]


def draws(count: int, config: DecodeConfig, **options) -> Draws:
    """What sentences that have decoded nothing yet draw by."""
    members = [Member(index, sentence, config) for index, sentence in enumerate(sentences([1] * count, **options))]
    return Draws.of(Grid(members, config.n_best, alike=False), torch.device("cpu"))


def frequencies(config: DecodeConfig, draws: int = 4000) -> list[float]:
    found = search(StubDecoding(three_ways, draws), sentences([1] * draws), config)
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
    for (found,) in search(StubDecoding(three_ways, 20), sentences([2] * 20), config):
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


def test_each_step_draws_anew():
    config = DecodeConfig(sampling=True, n_best=2)
    (found,) = run(lambda sentence, held: [NEVER, NEVER, NEVER, 0.0, 0.0, 0.0], config, [40])
    for hypothesis in found:
        assert len(hypothesis.tokens) == 40
        assert all(4 < hypothesis.tokens.count(token) < 25 for token in (3, 4, 5))


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
    noise = gumbel(torch.tensor([5, -7]), torch.tensor([3, 3]), tokens)
    expected = [
        [1.3748689486679635, 0.39948857671149196, -0.8776381670796058, 0.2551384532217431],
        [3.9650609355003814, 2.3927741882294704, 0.0643214128364173, 0.30497806145864076],
    ]
    assert noise.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]
    assert torch.equal(gumbel(torch.tensor([5, -7]), torch.tensor([3, 3]), tokens.flip(1)), noise.flip(1)), (
        "a function of the token"
    )
    others = [([5, -7], [4, 2]), ([6, 7], [3, 3])]
    many = [noise, *(gumbel(torch.tensor(seeds), torch.tensor(steps), tokens) for seeds, steps in others)]
    assert len(torch.cat(many).unique()) == 24

    def seeds(seed: int, keys: list[tuple[int, ...]]) -> Tensor:
        return draws(len(keys), DecodeConfig(sampling=True, seed=seed, n_best=3), keys=keys).seeds.view(-1, 3)

    apart = [seeds(seed, [(1, 0), (0, 1), (10,), (1,)]) for seed in (0, 1, -1, 2**70)]
    assert len(torch.stack(apart).unique()) == 4 * 4 * 3
    assert seeds(0, [(1, 0)]).tolist()[0][0] == 2333347468544467636


def test_noise_has_the_distribution_it_should_have():
    """Uniform once its own distribution function is applied, whether rows, steps or tokens are counted on."""
    one, zeros = torch.ones(1, dtype=torch.int64), torch.zeros(20_000, 1, dtype=torch.int64)
    across_tokens = gumbel(one, one, torch.arange(20_000).unsqueeze(0))
    across_rows = gumbel(torch.arange(20_000), one, zeros)
    across_steps = gumbel(one, torch.arange(20_000), zeros)
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
    by = draws(rows, DecodeConfig(sampling=True, **settings))
    before, after = (drawn(MatrixScores(scores), None, by) for scores in (log_probs, shaken))
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
    config = DecodeConfig(sampling=True, top_p=0.8, top_k=top_k)
    perturbed, tokens = perturbed_likely(MatrixScores(log_probs), None, draws(5, config))
    sizes = []
    for row, (scores, ids) in enumerate(zip(perturbed, tokens, strict=True)):
        kept = set(ids[scores > NEVER].tolist())
        alone = draws(1, config, keys=[(row,)])
        ((scores,), (ids,)) = perturbed_likely(MatrixScores(log_probs[row : row + 1]), None, alone)
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


@pytest.mark.parametrize("perturbed", [perturbed_all, perturbed_likely])
def test_rows_with_fewer_bans_than_others_lose_no_token_by_it(perturbed):
    config = DecodeConfig(sampling=True, top_p=1.0 if perturbed is perturbed_all else 0.999999)
    banned = torch.tensor([[0, 2, 3], [2, -1, -1], [-1, -1, -1]])
    scores, tokens = perturbed(MatrixScores(torch.zeros(3, V)), banned, draws(3, config))
    kept = [set(ids[row > NEVER].tolist()) for row, ids in zip(scores, tokens, strict=True)]
    assert kept == [{1, 4, 5}, {0, 1, 3, 4, 5}, set(range(V))]
