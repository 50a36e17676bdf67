"""What a step of a search does with the whole matrix of scores: as little as its policy needs."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.search import Driver, Sentence, rows_per_sentence

pytestmark = pytest.mark.numeric

V = 1000


class WholeMatrix(TorchDispatchMode):
    """Counts the operations that read or make a tensor of as many numbers as the scores have."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.reads: Counter[str] = Counter()
        self.makes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(isinstance(part, Tensor) and part.numel() >= self.numbers for part in args):
            self.reads[name] += 1
        made = result if isinstance(result, (tuple, list)) else [result]
        if any(isinstance(part, Tensor) and part.numel() >= self.numbers for part in made):
            self.makes[name] += 1
        return result


class Fixed:
    """The same logits for every step of `B` sentences; a `Decoding`."""

    def __init__(self, batch_size: int, beams: int) -> None:
        self.batch_size, self.beams = batch_size, beams
        generator = torch.Generator().manual_seed(1)
        self.matrix = torch.randn(batch_size * beams, V, generator=generator)

    def step(self, tokens: Tensor) -> MatrixScores:
        return MatrixScores(self.matrix)

    def reorder(self, beam: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("config", "most_reads"),
    [
        (DecodeConfig(beam_size=1), {"amax": 1, "sub": 1, "exp_": 1, "sum": 1, "max": 1, "topk": 1, "gather": 1}),
        (DecodeConfig(beam_size=4), {"amax": 1, "sub": 1, "exp_": 1, "sum": 1, "topk": 1, "gather": 1}),
        (
            DecodeConfig(sampling=True, n_best=3, top_k=10),
            {"amax": 1, "sub": 1, "exp_": 1, "sum": 1, "topk": 1, "gather": 1},
        ),
    ],
    ids=["greedy", "beam", "top-k"],
)
def test_of_the_whole_matrix_a_step_takes_a_top_k_and_a_log_sum_exp(config, most_reads):
    """No copy, no clone, no sort, no log-softmax; the one tensor of its size that is made is the exponentials."""
    B, rows = 3, rows_per_sentence(config)
    driver = Driver(config)
    sentence = Sentence(max_length=9, start_id=2, end_id=3, suppressed=(0, 2), prefix=(7,), config=config)
    decoding = Fixed(B, rows)
    before = decoding.matrix.clone()
    driver.adopt(decoding, [sentence] * B)
    for _ in range(3):  # forced, then free
        with WholeMatrix(B * rows * V) as mode:
            driver.step()
        assert mode.reads["topk"] + mode.reads["max"] >= 1, "it counts"
        assert not mode.reads - Counter(most_reads), dict(mode.reads)
        assert not mode.makes - Counter({"sub": 1, "exp_": 1}), dict(mode.makes)
    assert torch.equal(decoding.matrix, before), "scores are never written into"


def test_plain_sampling_makes_the_noise_it_needs_and_never_sorts():
    config = DecodeConfig(sampling=True)
    driver, decoding = Driver(config), Fixed(2, 1)
    before = decoding.matrix.clone()
    driver.adopt(decoding, [Sentence(max_length=9, start_id=2, end_id=3, suppressed=(0, 2))] * 2)
    with WholeMatrix(2 * V) as mode:
        driver.step()
    assert not {"sort", "topk", "clone", "_log_softmax", "cumsum"} & set(mode.reads)
    assert torch.equal(decoding.matrix, before)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_of_a_matrix_are_its_log_softmax(dtype):
    logits = (8 * torch.randn(5, 300, generator=torch.Generator().manual_seed(2))).to(dtype)
    expected = logits.double().log_softmax(1)
    scores = MatrixScores(logits)
    tokens = torch.tensor([[0, 299], [5, 5], [7, 8], [1, 2], [3, 4]])
    torch.testing.assert_close(scores.at(tokens), expected.gather(1, tokens), rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.log_z, logits.double().logsumexp(1), rtol=0, atol=1e-6)
    values, ids = scores.top(7)
    torch.testing.assert_close(values, expected.topk(7).values, rtol=0, atol=1e-6)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 9, 40])
def test_the_best_without_banned_ids_are_the_best_of_the_others(k):
    """Bans in any number, repeated, none, and of the very best; more asked for than are left."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    best = logits.argsort(dim=1, descending=True)
    banned = torch.stack([best[0, [0, 1, 2, 2]], best[1, [8, 3, 0, 4]], torch.full((4,), -1), best[3, [0, 5, 6, 7]]])
    banned[3, 1:] = -1
    values, ids = MatrixScores(logits).top(k, banned)
    assert values.shape == ids.shape == (4, min(k, 9))
    log_probs = logits.log_softmax(1)
    for row in range(4):
        left = [token for token in best[row].tolist() if token not in banned[row].tolist()]
        real = values[row] > -torch.inf
        assert ids[row][real].tolist() == left[:k]
        assert values[row][real].tolist() == pytest.approx(log_probs[row][left[:k]].tolist())
