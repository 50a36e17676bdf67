"""Products over packed weights: right for every type, and the same whatever is computed beside them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.translator.engine.native import ISAS, STORED, each_isa, multiply, pack
from translator.engine.native import library
from translator.engine.native.library import BFLOAT16, FLOAT16, FLOAT32, GELU, INT8, NO_ACTIVATION, RELU

each_type = pytest.mark.parametrize("kind", [FLOAT32, FLOAT16, BFLOAT16, INT8])
ERROR = 3e-6  # of a sum, in units of its largest terms' norm


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of rows, and their scales."""
    largest = x.abs().amax(dim=1, keepdim=True)
    return (x * (127 / largest)).round(), largest / 127


def held(kind: int, weight: Tensor) -> Tensor:
    """A weight as the packed form holds it, fp64."""
    if kind == INT8:
        rounded, scale = codes(weight)
        return rounded.double() * scale.double()
    return weight.to(STORED[kind]).double()


# M, N, K: one and more vectors, panels, kernels, groups and tiles, and what is left of them
SIZES = [(1, 1, 1), (2, 31, 3), (5, 33, 65), (16, 64, 64), (17, 97, 130), (33, 5, 512), (70, 130, 259)]


@each_isa
@each_type
@pytest.mark.parametrize("activation", [NO_ACTIVATION, RELU, GELU])
def test_product_against_fp64(isa: str, kind: int, activation: int, random: torch.Generator):
    kernels = library.load(isa)
    for i, (M, N, K) in enumerate(SIZES):
        x = torch.randn(M, K + 5, generator=random)[:, 1 : K + 1] * 3 + 1  # neither aligned nor side by side
        weight, bias = torch.randn(N, K, generator=random), torch.randn(N, generator=random)
        gamma, beta = (torch.randn(K, generator=random), torch.randn(K, generator=random)) if i % 2 else (None, None)
        around = torch.randn(M + 2, N + 7, generator=random)
        before = around.clone()
        y = around[1:-1, 3 : N + 3]
        residual = [y, torch.randn(M, N, generator=random), None][i % 3]  # added to in place, elsewhere, nothing
        added = 0 if residual is None else residual.double()
        multiply(
            kernels, kind, x, weight, bias, gamma=gamma, beta=beta, activation=activation, residual=residual,
            y=y, threads=i % 3 + 1,
        )  # fmt: skip

        inputs = x.double()
        if gamma is not None and beta is not None:
            inputs = F.layer_norm(inputs, (K,), gamma.double(), beta.double(), 1e-5)
        sums = inputs @ held(kind, weight).T + bias.double()
        expected = {NO_ACTIVATION: lambda v: v, RELU: F.relu, GELU: F.gelu}[activation](sums)
        expected = expected + added
        size = inputs.norm(dim=1, keepdim=True) * held(kind, weight).norm(dim=1) + 1
        # Codes are off by less than half a step, evenly spread: seven times the sum's deviation.
        step = inputs.abs().amax(dim=1, keepdim=True) / 127
        rounding = 2 * step * held(kind, weight).norm(dim=1) if kind == INT8 else 0
        assert ((y - expected).abs() <= ERROR * size + rounding).all(), (M, N, K)
        before[1:-1, 3 : N + 3] = y
        assert torch.equal(around, before), "written beside y"


@each_isa
@each_type
def test_rows_alone_and_among_others_are_equal_bit_by_bit(isa: str, kind: int, random: torch.Generator):
    kernels = library.load(isa)
    M, N, K = 70, 389, 200
    x, residual = torch.randn(M, K, generator=random), torch.randn(M, N, generator=random)
    gamma, beta = torch.randn(K, generator=random), torch.randn(K, generator=random)
    packed = pack(kernels, kind, torch.randn(N, K, generator=random), torch.randn(N, generator=random))
    assert packed is not None

    def product(rows: slice, threads: int) -> Tensor:
        return multiply(
            kernels, kind, x[rows], (packed, N), gamma=gamma, beta=beta, activation=GELU, residual=residual[rows],
            threads=threads,
        )  # fmt: skip

    alone = torch.cat([product(slice(m, m + 1), 1) for m in range(M)])
    for count in range(1, M + 1):
        assert torch.equal(product(slice(0, count), count % 3 + 1), alone[:count]), count
    for threads in (1, 2, 3, 7):
        assert torch.equal(product(slice(0, M), threads), alone), threads


@each_isa
@each_type
def test_many_rows_and_threads(isa: str, kind: int, random: torch.Generator):
    kernels = library.load(isa)
    M, N, K = 600, 70, 512  # several chunks of rows, rows that crowd the cache, fewer panels than threads
    x, weight = torch.randn(M, K, generator=random), torch.randn(N, K, generator=random)
    some = torch.cat([multiply(kernels, kind, x[m : m + 1], weight) for m in range(0, M, 97)])
    for threads in (1, 2, 8, 64):
        assert torch.equal(multiply(kernels, kind, x, weight, steps=3, threads=threads)[::97], some), threads


@each_isa
@each_type
def test_few_rows_behind_a_full_chunk(isa: str, kind: int, random: torch.Generator):
    """However many rows a chunk takes: one of these counts leaves each number of rows from 1 to 8 for the next."""
    kernels = library.load(isa)
    x, weight = torch.randn(68, 1024, generator=random), torch.randn(140, 1024, generator=random)
    whole = torch.cat([multiply(kernels, kind, x[m : m + 1], weight) for m in range(68)])
    for M in range(49, 69):
        assert torch.equal(multiply(kernels, kind, x[:M], weight), whole[:M]), M


@each_isa
@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("M", [1, 4, 70])
def test_half_weights_give_what_fp32_gives_with_their_values(isa: str, kind: int, M: int, random: torch.Generator):
    kernels = library.load(isa)
    x = torch.randn(M, 129, generator=random)
    weight = (torch.randn(67, 129, generator=random) * 0.02).to(STORED[kind])
    full = multiply(kernels, FLOAT32, x, weight.float())
    assert torch.equal(multiply(kernels, kind, x, weight), full)
    assert torch.equal(multiply(kernels, kind, x, weight.float()), full)
    assert torch.equal(multiply(kernels, FLOAT32, x, weight), full)


def test_instruction_sets_with_fused_sums_agree_bit_by_bit(random: torch.Generator):
    fused = [isa for isa in ISAS if isa != "generic"]
    if len(fused) < 2:
        pytest.skip("one instruction set")
    x, weight = torch.randn(20, 77, generator=random), torch.randn(40, 77, generator=random)
    for kind in (FLOAT32, FLOAT16, BFLOAT16, INT8):
        first, *others = (multiply(library.load(isa), kind, x, weight, activation=GELU) for isa in fused)
        assert all(torch.equal(first, other) for other in others), kind


@each_isa
@pytest.mark.parametrize("M", [1, 3, 14, 40])
def test_int8_sums_are_exact(isa: str, M: int, random: torch.Generator):
    x, weight = torch.randn(M, 1000, generator=random), torch.randn(50, 1000, generator=random)
    x[0], weight[0] = 1, 1  # 127 · 127 everywhere
    weight[1] = -1
    bias = torch.randn(50, generator=random)
    (x_codes, x_scale), (w_codes, w_scale) = codes(x), codes(weight)
    sums = (x_codes.double() @ w_codes.double().T).float()
    expected = sums * w_scale.T * x_scale + bias
    assert torch.equal(multiply(library.load(isa), INT8, x, weight, bias), expected)


@each_isa
@each_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e37, 1e-42, 0.0])
@pytest.mark.parametrize("normed", [False, True])
def test_a_strange_row_changes_no_other(isa: str, kind: int, bad: float, normed: bool, random: torch.Generator):
    kernels = library.load(isa)
    for M in (3, 40):
        x, weight = torch.randn(M, 70, generator=random), torch.randn(65, 70, generator=random)
        gamma = torch.ones(70) if normed else None
        calm = multiply(kernels, kind, x, weight, gamma=gamma)
        x[1] *= 1e-3
        x[1, 69] = bad
        if not bad:
            x[1] = 0
        y = multiply(kernels, kind, x, weight, gamma=gamma)
        others = torch.arange(M) != 1
        assert torch.equal(y[others], calm[others])
        if bad in (0.0, 1e-42):
            assert y[1].isfinite().all()
        elif not abs(bad) < float("inf"):
            assert not y[1].isfinite().any()
        elif not normed:
            expected = x[1].double() @ held(kind, weight).T
            assert torch.allclose(y[1].double(), expected, rtol=1e-3, atol=1e32)


@each_isa
@each_type
def test_a_row_of_zeros_gives_the_bias(isa: str, kind: int, random: torch.Generator):
    weight, bias = torch.randn(9, 20, generator=random), torch.randn(9, generator=random)
    assert torch.equal(multiply(library.load(isa), kind, torch.zeros(2, 20), weight, bias), bias.expand(2, -1))


@each_isa
def test_gelu_to_the_last_digits(isa: str):
    x = torch.linspace(-12, 12, 9601).unsqueeze(1)
    y = multiply(library.load(isa), FLOAT32, x, torch.ones(1, 1), activation=GELU)
    assert ((y - F.gelu(x.double())).abs() <= 1.5e-7 * x.abs().clamp(min=1)).all()


@each_isa
@pytest.mark.parametrize("source", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16, BFLOAT16])
def test_packing_rounds_as_pytorch_does(isa: str, source: int, kind: int, random: torch.Generator):
    numbers = torch.randn(4096, generator=random)
    numbers[:2048] *= 2.0 ** torch.randint(-30, 10, (2048,), generator=random)  # subnormal ones too
    numbers[:4] = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8])  # half-way
    numbers[4:8] = torch.tensor([65504.0, -65519.0, 2.0**-24, 2.0**-25])
    weight = numbers.clamp(-65504, 65504).to(STORED[source]) if source == FLOAT16 else numbers.to(STORED[source])
    if kind == FLOAT16 and source != FLOAT16:
        weight[5] = 1.5  # rounds beyond fp16 in bfloat16
        weight = weight.clamp(-60000, 60000)
    y = multiply(library.load(isa), kind, torch.ones(1, 1), weight.view(-1, 1))
    assert torch.equal(y[0], weight.to(STORED[kind]).float())


@each_isa
@each_type
def test_what_is_not_finite_is_refused(isa: str, kind: int):
    kernels = library.load(isa)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            weight = torch.zeros(40, 30, dtype=dtype)
            weight[39, 29] = bad
            assert pack(kernels, kind, weight) is None
    large = torch.full((1, 1), 70000.0)
    assert (pack(kernels, kind, large) is None) == (kind == FLOAT16)
