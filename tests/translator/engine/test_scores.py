"""Scores by the native kernels beside those of a matrix."""

import pytest
import torch
from torch import Tensor

from tests.translator.engine.native import each_isa
from tests.translator.search.models import BEAM, GREEDY, StubDecoding, assert_same, random_table, sentences
from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.engine.native import library
from translator.engine.scores import NativeScores
from translator.errors import UserError
from translator.search import check_finite, rows_per_sentence, search

pytestmark = pytest.mark.numeric

NEVER = float("-inf")


def drawn(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Rows that lie apart, and not at the beginning of their memory."""
    whole = 5 * torch.randn(rows, vocabulary + 5, generator=torch.Generator().manual_seed(seed))
    return whole[:, 3:-2]


def assert_equal_choices(native: NativeScores, matrix: MatrixScores, k: int, banned: Tensor | None) -> None:
    """The same values in order, and ids that are worth them, no two the same, none of them banned but at -inf."""
    values, ids = native.top(k, banned)
    wanted, _ = matrix.top(k, banned)
    assert values.dtype == wanted.dtype == torch.float64 and ids.dtype == torch.int64
    torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)
    worth = matrix.at(ids)
    real = values > NEVER
    torch.testing.assert_close(values[real], worth[real], rtol=0, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    if banned is not None:
        assert not bool((ids.unsqueeze(2) == banned.unsqueeze(1)).any(dim=2)[real].any())


@each_isa
@pytest.mark.parametrize("vocabulary", [2, 7, 100, 3001])
def test_native_scores_are_those_of_the_matrix(isa: str, vocabulary: int) -> None:
    rows = 6
    generator = torch.Generator().manual_seed(vocabulary)
    logits = drawn(rows, vocabulary)
    cases = [logits, logits.round(), torch.zeros_like(logits), logits.sort(dim=1).values]
    hopeless = logits.clone()
    hopeless[:, 1:] = NEVER
    for case in [*cases, hopeless]:
        native, matrix = NativeScores(library.load(isa), case, threads=2), MatrixScores(case)
        assert (native.rows, native.vocab_size) == (rows, vocabulary)
        torch.testing.assert_close(native.log_z, matrix.log_z, rtol=0, atol=1e-5)
        assert native.logits().data_ptr() == case.data_ptr()
        any_of = torch.randint(-1, vocabulary, (rows, 3), generator=generator)
        worst = case.argsort(dim=1, descending=True)[:, : min(vocabulary, 4)]
        for k in (1, 2, 5, vocabulary, vocabulary + 3):
            for banned in (None, any_of, worst, any_of.T.contiguous().T, worst[:, :0]):
                assert_equal_choices(native, matrix, k, banned)


@each_isa
def test_all_ids_banned_leaves_nothing(isa: str) -> None:
    banned = torch.arange(4).repeat(3, 1)
    values, ids = NativeScores(library.load(isa), drawn(3, 4)).top(2, banned)
    assert values.tolist() == [[NEVER] * 2] * 3 and ids.shape == (3, 2)


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_log_z(isa: str, bad: float) -> None:
    for place in (0, 50, 99):
        logits = drawn(3, 100)
        logits[1, place] = bad
        native = NativeScores(library.load(isa), logits)
        native.top(5, torch.tensor([[1], [place], [2]]))
        with pytest.raises(UserError, match="NaN instead of probabilities"):
            check_finite(native.log_z)
        assert native.log_z[[0, 2]].isfinite().all()


@each_isa
@pytest.mark.parametrize(
    "config",
    [GREEDY, BEAM, DecodeConfig(sampling=True, n_best=3, top_k=3), DecodeConfig(sampling=True, n_best=2, top_p=0.8)],
    ids=["greedy", "beam", "top-k", "top-p"],
)
def test_a_search_finds_the_same_with_either(isa: str, config: DecodeConfig) -> None:
    kernels, limits = library.load(isa), [9, 4, 7]

    class Native(StubDecoding):
        def step(self, tokens: Tensor) -> MatrixScores:
            return NativeScores(kernels, super().step(tokens).logits().float())

    for seed in range(3):
        table = random_table(seed)
        rows = rows_per_sentence(config)
        found = search(Native(table, len(limits), rows), sentences(limits, prefixes=[(), (3,), ()]), config)
        wanted = search(StubDecoding(table, len(limits), rows), sentences(limits, prefixes=[(), (3,), ()]), config)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_same(mine, theirs, tolerance=1e-5)


@each_isa
def test_logits_that_the_kernels_cannot_read_are_refused(isa: str) -> None:
    for logits in (drawn(4, 9).double(), drawn(4, 9).T):
        with pytest.raises(ValueError, match="the kernels take rows of float32 on the CPU"):
            NativeScores(library.load(isa), logits)
