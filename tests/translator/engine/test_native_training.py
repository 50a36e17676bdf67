"""The kernels of a training step against PyTorch in fp64, on every instruction set of the machine."""

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.translator.engine.native import Kernels, address, each_isa
from translator.engine.native import library

NAN = float("nan")
EDGE = 16  # numbers before and behind whatever a kernel writes
TYPES = {torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16}
each_type = pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
each_size = pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (5, 16), (17, 33), (9, 256), (70, 100)])
THREADS = (1, 2, 3)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def room(*shape: int, dtype: torch.dtype = torch.float32, given: Tensor | None = None) -> Tensor:
    """Memory of its own for a kernel to write, NaN or as `given`, between edges that stay NaN; see `untouched`."""
    size = torch.Size(shape).numel()
    inner = torch.full((size + 2 * EDGE,), NAN, dtype=dtype)[EDGE : EDGE + size].view(shape)
    return inner if given is None else inner.copy_(given)


def untouched(*written: Tensor) -> bool:
    """Whether nothing was written around tensors of `room`."""
    blocks = [x.as_strided((x.numel() + 2 * EDGE,), (1,), 0) for x in written]
    return all(block[:EDGE].isnan().all() and block[-EDGE:].isnan().all() for block in blocks)


def close(found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    """Within fp32 sums and one rounding to the type found."""
    rtol = 2**-8 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=atol)


def hashed(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser, on 32 bits of int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def factors(total: int, seed: int, threshold: int) -> Tensor:
    """What dropout multiplies each element by, as `training.cpp` says it is drawn, in fp64."""
    element = torch.arange(total)
    place = element // 64 * 16 + element % 16
    random = hashed(place * 0x9E3779B9 + hashed(torch.tensor(seed)) & 0xFFFFFFFF)
    byte = random >> (element % 64 // 16 * 8) & 0xFF
    return (byte >= threshold).double() * 256 / (256 - threshold)


# -- norms ------------------------------------------------------------------------------------------------------------


@each_isa
@each_type
@each_size
def test_norm_and_its_gradients(isa: str, dtype: torch.dtype, rows: int, width: int) -> None:
    kernels, kind = library.load(isa), TYPES[dtype]
    x, dy = drawn(rows, width) * 3 + 7, drawn(rows, width, seed=3, dtype=dtype)
    gamma, beta = drawn(width, seed=1), drawn(width, seed=2)
    wide = [part.double().requires_grad_() for part in (x, gamma, beta)]
    wanted = F.layer_norm(wide[0], (width,), *wide[1:], 1e-5)
    slopes = torch.autograd.grad(wanted, wide, dy.double())
    before: list[Tensor] = []
    for threads in THREADS:
        y, mean, inverse = room(rows, width, dtype=dtype), room(rows), room(rows)
        places = [address(part) for part in (x, gamma, beta)]
        kernels.train_norm(*places, 1e-5, rows, width, kind, address(y), address(mean), address(inverse), threads)
        assert untouched(y, mean, inverse)
        close(y, wanted.detach(), 1e-4)
        dx, dgamma, dbeta = room(rows, width), room(width), room(width)
        kernels.train_norm_back(
            *(address(dy), kind, address(x), address(gamma), address(mean), address(inverse), rows, width),
            *(address(dx), address(dgamma), address(dbeta), threads),
        )
        assert untouched(dx, dgamma, dbeta)
        for found, slope in zip((dx, dgamma, dbeta), slopes, strict=True):
            torch.testing.assert_close(found.double(), slope, rtol=1e-4, atol=1e-4)
        assert not before or (torch.equal(y, before[0]) and torch.equal(dx, before[1]))
        before = [y, dx]


# -- dropout ----------------------------------------------------------------------------------------------------------


@each_isa
@pytest.mark.parametrize("total", [1, 15, 63, 64, 65, 100, 1000])
def test_dropout_and_residual_by_the_mask_that_seed_and_place_decide(isa: str, total: int) -> None:
    kernels = library.load(isa)
    for dtype, kind in TYPES.items():
        y, residual, grad = drawn(total, dtype=dtype), drawn(total, seed=1), drawn(total, seed=2)
        for seed, threshold in ((0, 0), (7, 26), (2**32 - 1, 128), (123456789, 255)):
            keep = factors(total, seed, threshold)
            for threads in THREADS:
                out, dy = room(total), room(total, dtype=dtype)
                kernels.train_residual(
                    address(y), kind, address(residual), total, seed, threshold, address(out), threads
                )
                kernels.train_residual_back(address(grad), total, seed, threshold, address(dy), kind, threads)
                assert untouched(out, dy)
                close(out, residual.double() + y.double() * keep, 1e-6)
                close(dy, grad.double() * keep, 0.0)
                assert torch.equal(dy == 0, (keep == 0) | (grad == 0))


@each_isa
@each_type
@pytest.mark.parametrize("total", [1, 15, 64, 100, 1000])
def test_relu_and_dropout_in_place(isa: str, dtype: torch.dtype, total: int) -> None:
    kernels, kind = library.load(isa), TYPES[dtype]
    x, dy = drawn(total, dtype=dtype), drawn(total, seed=2, dtype=dtype)
    for seed, threshold in ((0, 0), (7, 26), (99, 200)):
        keep = factors(total, seed, threshold)
        for threads in THREADS:
            y, grad = room(total, dtype=dtype, given=x), room(total, dtype=dtype, given=dy)
            kernels.train_relu(address(y), kind, total, seed, threshold, threads)
            kernels.train_relu_back(address(y), address(grad), kind, total, threshold, threads)
            assert untouched(y, grad)
            close(y, x.double().relu() * keep, 0.0)
            close(grad, dy.double() * keep * (x > 0), 0.0)


@each_isa
def test_relu_hides_no_nan(isa: str) -> None:
    x = drawn(40)
    x[[3, 38]] = NAN
    library.load(isa).train_relu(address(x), library.FLOAT32, 40, 1, 0, 1)
    assert x.isnan().nonzero().flatten().tolist() == [3, 38]


def mask(kernels: Kernels, total: int, seed: int, threshold: int) -> Tensor:
    ones, dy = torch.ones(total), torch.empty(total)
    kernels.train_residual_back(address(ones), total, seed, threshold, address(dy), library.FLOAT32, 1)
    return dy > 0


@each_isa
def test_masks_are_as_frequent_as_asked_and_independent(isa: str) -> None:
    kernels, total = library.load(isa), 1 << 18
    masks = [mask(kernels, total, seed, 64) for seed in (1, 2, 3)]
    for index, one in enumerate(masks):
        # Four standard deviations of a share, and of an agreement, of `total` independent draws.
        assert abs(float(one.double().mean()) - 0.75) < 4 * (0.75 * 0.25 / total) ** 0.5
        expected, off = 0.75**2 + 0.25**2, 4 * (0.625 * 0.375 / total) ** 0.5
        for distance in (1, 4, 16, 64, 256, 1024):  # elements of one hash, of one block, of neighbouring rows
            assert abs(float((one == one.roll(distance)).double().mean()) - expected) < off
        for other in masks[:index]:
            assert abs(float((one == other).double().mean()) - expected) < off


# -- the loss ---------------------------------------------------------------------------------------------------------


@each_isa
@each_type
@pytest.mark.parametrize(("rows", "V"), [(1, 1), (2, 15), (3, 16), (7, 33), (5, 8001)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_and_its_gradient_in_the_logits_place(
    isa: str, dtype: torch.dtype, rows: int, V: int, smoothing: float
) -> None:
    kernels, scale = library.load(isa), 1 / 37
    given = drawn(rows, V, dtype=dtype) * 5
    given[0] += 500  # shifted before anything overflows
    target = torch.arange(rows) * 31 % V
    target[-1] = V - 1
    wide = given.double().requires_grad_()
    wanted = F.cross_entropy(wide, target, label_smoothing=smoothing, reduction="none")
    (slope,) = torch.autograd.grad(wanted.sum() * scale, wide)
    for threads in THREADS:
        logits, losses = room(rows, V, dtype=dtype, given=given), room(rows, dtype=torch.float64)
        kernels.train_loss(
            *(address(logits), TYPES[dtype], rows, V, address(target), smoothing, scale, address(losses), threads)
        )
        assert untouched(logits, losses)
        torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=2e-4)  # fp32 has 6e-5 at 500
        close(logits, slope, 1e-7)


@each_isa
def test_a_loss_of_what_is_no_number_is_none(isa: str) -> None:
    logits, losses, target = drawn(3, 50), torch.zeros(3, dtype=torch.float64), torch.tensor([4, 5, 6])
    logits[1, 20] = NAN
    library.load(isa).train_loss(
        *(address(logits), library.FLOAT32, 3, 50, address(target), 0.1, 1.0, address(losses), 1)
    )
    assert losses.isnan().tolist() == [False, True, False]


# -- attention --------------------------------------------------------------------------------------------------------


def starts(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def attended(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], causal: bool) -> Tensor:
    """Sentence by sentence, in the type given: q `(N, H, D_head)`, k, v `(N_keys, H, D_head)`."""
    rows = []
    for one, *others in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        parts = (part.transpose(0, 1) for part in (one, *others))
        rows.append(F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(0, 1))
    return torch.cat(rows)


@each_isa
@each_type
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 5), (2, 16), (2, 24), (4, 32), (1, 65)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_packed_sentences_and_its_gradients(
    isa: str, dtype: torch.dtype, heads: int, width: int, causal: bool
) -> None:
    kernels, D = library.load(isa), heads * width
    queries = [1, 3, 16, 1, 17, 40]
    keys = queries if causal else [2, 1, 15, 1, 33, 16]
    both = drawn(sum(queries), D + 3, dtype=dtype), drawn(sum(keys), 2 * D + 5, dtype=dtype)
    q, k, v = both[0][:, 1 : 1 + D], both[1][:, 2 : 2 + D], both[1][:, 3 + D : 3 + 2 * D]  # of wider rows
    dy = drawn(sum(queries), D, seed=9, dtype=dtype)
    wide = [part.double().reshape(-1, heads, width).requires_grad_() for part in (q, k, v)]
    wanted = attended(*wide, queries, keys, causal)
    slopes = torch.autograd.grad(wanted, wide, dy.double().view_as(wanted))
    offsets = starts(queries), starts(keys)
    for threads in THREADS:
        y, dq = (room(sum(queries), D, dtype=dtype) for _ in range(2))
        dkv = room(sum(keys), 2 * D + 1, dtype=dtype)
        call = library.PackedAttention(
            q=address(q), k=address(k), v=address(v), y=address(y), q_starts=address(offsets[0]),
            k_starts=address(offsets[1]), ldq=D + 3, ldk=2 * D + 5, ldv=2 * D + 5, ldy=D, sentences=len(queries),
            type=TYPES[dtype], H=heads, D_head=width, causal=causal, scale=width**-0.5,
        )  # fmt: skip
        kernels.packed_attention(ctypes.byref(call), 0, threads)
        close(y, wanted.detach().flatten(1))
        call.y, call.dq, call.dk, call.dv = address(dy), address(dq), address(dkv), address(dkv[:, D + 1 :])
        call.ld_dq, call.ld_dk, call.ld_dv = D, 2 * D + 1, 2 * D + 1
        kernels.packed_attention(ctypes.byref(call), 1, threads)
        assert untouched(y, dq, dkv) and dkv[:, D].isnan().all()
        for found, slope in zip((dq, dkv[:, :D], dkv[:, D + 1 :]), slopes, strict=True):
            close(found, slope.flatten(1), 2e-5)


@each_isa
def test_attention_weights_that_would_overflow(isa: str) -> None:
    q, k, v, y = drawn(20, 8) * 100, drawn(20, 8) * 100, drawn(20, 8, seed=1), torch.full((20, 8), NAN)
    offsets = starts([20])
    call = library.PackedAttention(
        q=address(q), k=address(k), v=address(v), y=address(y), q_starts=address(offsets), k_starts=address(offsets),
        ldq=8, ldk=8, ldv=8, ldy=8, sentences=1, type=library.FLOAT32, H=1, D_head=8, causal=1, scale=8**-0.5,
    )  # fmt: skip
    library.load(isa).packed_attention(ctypes.byref(call), 0, 1)
    wide = (part.double().unsqueeze(1) for part in (q, k, v))
    torch.testing.assert_close(y.double(), attended(*wide, [20], [20], True).squeeze(1), rtol=1e-3, atol=1e-3)
