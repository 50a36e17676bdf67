"""Norms, the log-sum-exp and the top k, on every instruction set of the machine."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.translator.engine.native import Kernels, address, each_isa, run
from translator.engine.native import library

NAN, INF = float("nan"), float("inf")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def log_z(kernels: Kernels, logits: Tensor, threads: int = 1) -> Tensor:
    found = torch.full((logits.shape[0],), NAN, dtype=torch.float64)
    kernels.log_z(address(logits), *logits.shape, logits.stride(0), address(found), threads)
    return found


def top(
    kernels: Kernels, logits: Tensor, k: int, banned: Tensor | None = None, threads: int = 1
) -> tuple[Tensor, Tensor]:
    values = torch.full((logits.shape[0], k), NAN, dtype=torch.float64)
    ids, normaliser = torch.full((logits.shape[0], k), -7), torch.full((logits.shape[0],), NAN, dtype=torch.float64)
    spare = 0 if banned is None else banned.shape[1]
    where = address(logits), *logits.shape, logits.stride(0)
    kernels.top(*where, k, address(banned), spare, address(values), address(ids), address(normaliser), threads)
    assert torch.equal(normaliser.nan_to_num(7), log_z(kernels, logits).nan_to_num(7))
    return values, ids


def norm(kernels: Kernels, x: Tensor, gamma: Tensor | None, beta: Tensor | None, threads: int = 1) -> Tensor:
    rows, width = x.shape
    y = torch.full((rows, width + 2), NAN)
    call = library.Norm(
        x=address(x), gamma=address(gamma), beta=address(beta), y=address(y), ldx=x.stride(0), ldy=width + 2,
        width=width, T=1, eps=1e-5,
    )  # fmt: skip
    run(kernels, [call], rows, threads)
    assert y[:, width:].isnan().all()
    return y[:, :width]


@each_isa
@pytest.mark.parametrize("width", [1, 2, 5, 16, 31, 64, 100, 384, 1031])
def test_norm(isa: str, width: int) -> None:
    kernels = library.load(isa)
    x = (drawn(5, width + 3) * 3 + 7)[:, 3:]
    gamma, beta = drawn(width, seed=1), drawn(width, seed=2)
    for weight, bias in ((gamma, beta), (gamma, None), (None, beta), (None, None)):
        wide = (None if part is None else part.double() for part in (weight, bias))
        wanted = F.layer_norm(x.double(), (width,), *wide, 1e-5)
        found = norm(kernels, x, weight, bias)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, norm(kernels, x, weight, bias, threads=3))
        assert torch.equal(found[3:4], norm(kernels, x[3:4], weight, bias))


@each_isa
def test_norm_of_numbers_far_from_zero(isa: str) -> None:
    x = drawn(4, 384) + 3000  # E[x²] - E[x]² would have nothing left
    wanted = F.layer_norm(x.double(), (384,), eps=1e-5)
    torch.testing.assert_close(norm(library.load(isa), x, None, None).double(), wanted, rtol=1e-2, atol=1e-3)
    x[1, 100] = NAN
    found = norm(library.load(isa), x, None, None)
    assert found[1].isnan().all() and not found[[0, 2, 3]].isnan().any()


@each_isa
@pytest.mark.parametrize("vocab", [1, 3, 17, 100, 8000])
def test_log_z(isa: str, vocab: int) -> None:
    kernels = library.load(isa)
    logits = (drawn(5, vocab + 3) * 8)[:, 3:]
    found = log_z(kernels, logits)
    torch.testing.assert_close(found, logits.double().logsumexp(1), rtol=1e-6, atol=1e-6)
    assert torch.equal(found, log_z(kernels, logits, threads=2))
    assert torch.equal(found[2:3], log_z(kernels, logits[2:3]))


@each_isa
def test_log_z_of_extremes(isa: str) -> None:
    kernels, logits = library.load(isa), drawn(7, 50)
    logits[0] = 3e38
    logits[1] = -3e38
    logits[2, 10:] = -INF
    logits[3] = -INF
    logits[4, 30] = NAN
    logits[5, 49] = INF
    logits[6, 49] = NAN
    found = log_z(kernels, logits)
    torch.testing.assert_close(found[:3], logits[:3].double().logsumexp(1), rtol=1e-6, atol=1e-6)
    assert found[3] == -INF and found[4].isnan() and found[6].isnan()
    assert found[5].isnan() or found[5] == INF


def check_top(kernels: Kernels, logits: Tensor, k: int, banned: Tensor | None, threads: int = 1) -> None:
    values, ids = top(kernels, logits, k, banned, threads)
    normalisers = log_z(kernels, logits).tolist()
    for m, row in enumerate(logits.tolist()):
        forbidden = set() if banned is None else set(banned[m].tolist())
        numbers = [(-value, id) for id, value in enumerate(row) if not math.isnan(value) and id not in forbidden]
        wanted = sorted(numbers)[:k]
        chosen = ids[m].tolist()
        assert chosen[: len(wanted)] == [id for _, id in wanted]
        if math.isfinite(normalisers[m]):
            probable = [-value - normalisers[m] for value, _ in wanted]
            assert values[m].tolist() == probable + [-INF] * (k - len(wanted))
        else:
            assert not values[m].isfinite().any()
        assert len({id for id in chosen if 0 <= id < len(row)}) == k


@each_isa
@pytest.mark.parametrize("vocab", [1, 5, 40, 2001])
def test_top(isa: str, vocab: int) -> None:
    kernels = library.load(isa)
    logits = (drawn(3, vocab + 1) * 4)[:, 1:]
    rising = torch.arange(3 * vocab).view(3, vocab) * 1.0
    ties = logits.round()
    for k in {1, 2, 5, 8, 33, vocab // 2, vocab}:
        if not 0 < k <= vocab:
            continue
        banned = logits.topk(k).indices[:, : max(1, k // 2)].contiguous()
        banned[1, 0] = -1
        for scores in (logits, ties, rising, -rising, torch.zeros_like(logits)):
            check_top(kernels, scores, k, None)
            check_top(kernels, scores, k, banned, threads=2)


@each_isa
def test_top_of_numbers_that_are_none(isa: str) -> None:
    kernels, logits = library.load(isa), drawn(4, 200)
    logits[0, ::2] = NAN
    logits[1, 3:] = -INF
    logits[1, 0] = NAN
    logits[2] = NAN
    logits[3, 5], logits[3, 6] = INF, -INF
    banned = torch.tensor([[1, 3], [2, 1], [0, -1], [5, 5]])
    for k in (1, 4, 150, 199, 200):
        check_top(kernels, logits, k, None)
        check_top(kernels, logits, k, banned)
