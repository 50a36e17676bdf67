"""Attention kernels by name: they agree, and what is said of each is so."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from tests.helpers import tiny_model64
from translator import CachedDecoder, cli
from translator.attention import (
    KERNELS,
    AttentionKernel,
    PackedPass,
    Packing,
    UnsupportedKernelOperation,
    attend,
    named_kernel,
    register_kernel,
    varlen,
)
from translator.errors import UserError

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
HERE = [name for name in sorted(KERNELS) if not KERNELS[name].missing(CPU)]
B, H, T, S, WIDTH = 2, 4, 3, 7, 8


def test_those_that_run_on_a_cpu() -> None:
    assert {"eager", "sdpa"} <= set(HERE) and "varlen" not in HERE


def tensors(T: int = T, S: int = S, kv_heads: int = H, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    shapes = ((B, H, T, WIDTH), (B, kv_heads, S, WIDTH), (B, kv_heads, S, WIDTH))
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def written_out(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, added: Tensor) -> Tensor:
    """Query by query over the keys that it sees alone; `sees` and `added` `(B, H, T, S)`."""
    found = torch.zeros(B, H, q.shape[2], WIDTH, dtype=q.dtype)
    group = H // k.shape[1]
    for b in range(B):
        for h in range(H):
            for t in range(q.shape[2]):
                keys = sees[b, h, t].nonzero()[:, 0]
                if len(keys):
                    scores = k[b, h // group, keys] @ q[b, h, t] / math.sqrt(WIDTH) + added[b, h, t, keys]
                    found[b, h, t] = scores.softmax(0) @ v[b, h // group, keys]
    return found


def blind_row() -> Tensor:
    """`(B, 1, T, S)`: the last query of the second row sees nothing."""
    mask = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(5)) > 0.4
    mask[1, 0, 2] = False
    return mask


MASKS: dict[str, tuple[Any, bool]] = {
    "nothing hidden": (None, False),
    "behind a filled cache": (None, True),
    "a mask": (blind_row(), False),
    "a mask for all rows": (torch.ones(T, S).tril(1).bool(), False),
    "floats": (torch.randn(B, 1, 1, S, dtype=torch.float64), False),
}


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("hidden", sorted(MASKS))
@pytest.mark.parametrize("name", HERE)
def test_kernels_agree_with_attention_written_out(name: str, hidden: str, kv_heads: int) -> None:
    q, k, v = tensors(kv_heads=kv_heads)
    mask, is_causal = MASKS[hidden]
    sees = torch.ones(B, H, T, S).tril(S - T).bool() if is_causal else torch.ones(B, H, T, S).bool()
    added = torch.zeros(B, H, T, S, dtype=torch.float64)
    if mask is not None and mask.dtype == torch.bool:
        sees = mask.expand(B, H, T, S)
    elif mask is not None:
        added = mask.expand(B, H, T, S)
    found = KERNELS[name](q, k, v, mask, is_causal)
    torch.testing.assert_close(found, written_out(q, k, v, sees, added), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", HERE)
def test_a_causal_flag_for_one_query_hides_nothing(name: str) -> None:
    q, k, v = tensors(T=1)
    torch.testing.assert_close(KERNELS[name](q, k, v, None, True), attend(q, k, v, None), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", HERE)
def test_keys_kept_in_another_type(name: str) -> None:
    q, k, v = tensors()
    found = KERNELS[name](q, k.float(), v.float(), MASKS["a mask"][0])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, KERNELS[name](q, k, v, MASKS["a mask"][0]), rtol=0, atol=1e-5)


# -- what is said of each ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_who_stores_the_scores(name: str) -> None:
    q, k, v = tensors(T=96, S=96)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        KERNELS[name](q, k, v, None, True)
    most = max(event.self_cpu_memory_usage for event in run.events())  # bytes that one operator allocated
    assert (most >= B * H * 96 * 96 * q.itemsize) == KERNELS[name].stores_scores(CPU)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_who_returns_weights(name: str) -> None:
    kernel = KERNELS[name]
    q, k, v = tensors()
    if not kernel.returns_weights:
        with pytest.raises(UnsupportedKernelOperation, match=f"{name!r} cannot return attention weights; eager can"):
            kernel.weighed(q, k, v, None)
        return
    found, weights = kernel.weighed(q, k, v, blind_row())
    assert weights.shape == (B, H, T, S)
    torch.testing.assert_close(weights @ v, found, rtol=0, atol=1e-12)
    seen = blind_row().any(-1).expand(B, H, T)
    torch.testing.assert_close(weights.sum(-1), seen.double(), rtol=0, atol=1e-12)


def test_only_the_written_out_kernel_returns_weights() -> None:
    assert [name for name, kernel in KERNELS.items() if kernel.returns_weights] == ["eager"]


def test_the_written_out_softmax_is_in_fp32_at_least() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        found, weights = KERNELS["eager"].weighed(*tensors(dtype=dtype), None)
        assert (found.dtype, weights.dtype) == (dtype, wide)


@pytest.fixture
def sdpa_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, bool, bool]]]:
    """`(T, S, whether there was a mask, whether it was causal)` of each call."""
    calls: list[tuple[int, int, bool, bool]] = []
    inner = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, **rest: Any) -> Tensor:
        calls.append((q.shape[2], k.shape[2], attn_mask is not None, is_causal))
        return inner(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    yield calls


def test_sdpa_gets_a_mask_only_where_it_needs_one(sdpa_calls: list[tuple[int, int, bool, bool]]) -> None:
    decoder, memory = small_decoder("sdpa")
    cache = decoder.start(memory)
    for length in (4, 1, 1, 3, 1):
        decoder(torch.randn(B, length, 16, dtype=torch.float64), cache)
    own = [call for call in sdpa_calls if call[1] != 5]  # not those to the source of 5 tokens
    # First a prefix on nothing: the causal flag. Then single tokens: neither. A prefix behind others: a mask.
    expected = [(4, 4, False, True), (1, 6, False, False), (3, 9, True, False), (1, 10, False, False)]
    assert list(dict.fromkeys(own)) == expected
    assert all(not causal for length, _, _, causal in sdpa_calls if length == 1)
    sdpa_calls.clear()
    KERNELS["sdpa"](*tensors(), None, True)
    KERNELS["sdpa"](*tensors(T=1), None, True)
    assert sdpa_calls == [(T, S, True, False), (1, S, False, False)]


def test_the_written_out_kernel_always_has_a_mask_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from translator.attention import eager

    made = []
    inner = eager.causal_mask
    monkeypatch.setattr(eager, "causal_mask", lambda *sizes: made.append(sizes[:2]) or inner(*sizes))
    KERNELS["eager"](*tensors(T=S), None, True)
    assert made == [(S, S)]


def test_flex_gets_a_function_and_never_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    from translator.attention import flex

    given: list[dict[str, Any]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.append(options)
        return torch.zeros_like(q)

    monkeypatch.setattr(flex, "_attention", lambda device: watched)
    q, k, v = tensors()
    KERNELS["flex"](q, k, v, None)
    KERNELS["flex"](q, k, v, None, True)
    KERNELS["flex"](q, k, v, blind_row())
    assert "block_mask" not in given[0]
    assert all(isinstance(options["block_mask"], BlockMask) for options in given[1:])
    with pytest.raises(UnsupportedKernelOperation, match="'flex' cannot drop attention weights"):
        KERNELS["flex"](q, k, v, None, False, 0.1)


# -- sequences one after another --------------------------------------------------------------------------------------


@pytest.fixture
def plain_varlen(monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    """The kernel around a loop in the place of PyTorch's own, in any type."""

    def loop(q, k, v, q_starts, k_starts, longest_q, longest_k, is_causal):
        assert (longest_q, longest_k) == (int(q_starts.diff().max()), int(k_starts.diff().max()))
        parts = []
        for place in range(len(q_starts) - 1):
            mine, keys = slice(*q_starts[place : place + 2].tolist()), slice(*k_starts[place : place + 2].tolist())
            one = [part.transpose(0, 1).unsqueeze(0) for part in (q[mine], k[keys], v[keys])]
            parts.append(KERNELS["eager"](*one, None, is_causal)[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen", loop)
    monkeypatch.setattr(varlen, "TYPES", (torch.float64,))
    return KERNELS["varlen"]


def test_varlen_takes_padding_out(plain_varlen: AttentionKernel) -> None:
    q, k, v = tensors(kv_heads=2)
    mask = (torch.arange(S) < torch.tensor([[S], [4]]))[:, None, None]
    expected = KERNELS["eager"](q, k, v, mask)
    k[1, :, 4:] = v[1, :, 4:] = torch.nan  # what is taken out can't do harm
    torch.testing.assert_close(plain_varlen(q, k, v, mask), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain_varlen(*tensors(), None, True), KERNELS["eager"](*tensors(), None, True))
    for wrong in (blind_row(), mask.flip(-1)):
        with pytest.raises(UnsupportedKernelOperation, match="'varlen' cannot follow a mask"):
            plain_varlen(q, k, v, wrong)


def test_varlen_reads_packed_sequences(plain_varlen: AttentionKernel) -> None:
    packing = Packing([3, 5, 1])
    q, k, v = (torch.randn(1, H, packing.count, WIDTH, dtype=torch.float64) for _ in range(3))
    expected = PackedPass(packing, True).attend(q, k, v, KERNELS["eager"])
    found = PackedPass(packing, True).attend(q, k, v, plain_varlen)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert "packed" in plain_varlen.layouts and all("packed" not in KERNELS[name].layouts for name in HERE)


def test_varlen_computes_in_half_precision_alone() -> None:
    with pytest.raises(UnsupportedKernelOperation, match="'varlen' cannot compute in float64"):
        KERNELS["varlen"](*tensors(), None)


# -- chosen for a decoder ---------------------------------------------------------------------------------------------


def small_decoder(name: str) -> tuple[CachedDecoder, Tensor]:
    torch.manual_seed(4)
    layer = nn.TransformerDecoderLayer(16, H, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    decoder = CachedDecoder.from_torch(nn.TransformerDecoder(layer, 2).eval(), attention_kernel=name).eval()
    return decoder, torch.randn(B, 5, 16, dtype=torch.float64)


@pytest.mark.parametrize("name", HERE)
def test_a_decoder_computes_the_same_with_every_kernel(name: str) -> None:
    usual, memory = small_decoder("sdpa")
    decoder, _ = small_decoder(name)
    assert decoder.attention_kernel == name
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2 * B, 7, 16, dtype=torch.float64)
    expected, found = (each.start(memory, padding, beams=2) for each in (usual, decoder))
    for cut in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)):
        torch.testing.assert_close(decoder(x[:, cut], found), usual(x[:, cut], expected), rtol=0, atol=1e-10)
        for cache in (expected, found):
            cache.reorder(torch.tensor([[1, 0], [1, 1]]))
            if cache.length == 3:
                cache.crop(torch.tensor([3, 3, 2, 2]))


@pytest.mark.parametrize("name", HERE)
def test_a_model_computes_the_same_with_every_kernel(name: str) -> None:
    model = tiny_model64()
    source, target = torch.randint(4, 400, (2, 9)), torch.randint(4, 400, (2, 6))
    padding = torch.tensor([[False] * 9, [False] * 6 + [True] * 3])
    expected = model(source, target, padding)
    try:
        model.attention_kernel = name
        torch.testing.assert_close(model(source, target, padding), expected, rtol=0, atol=1e-9)
    finally:
        model.attention_kernel = "sdpa"


def test_a_kernel_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("translator.attention.named_kernels.KERNELS", known := dict(KERNELS))

    @register_kernel
    class Counting(AttentionKernel):
        name = "counting"
        mask = "as it comes"
        calls = 0

        def stores_scores(self, device: torch.device) -> bool:
            return False

        def __call__(self, q, k, v, mask, is_causal=False, dropout=0.0) -> Tensor:
            Counting.calls += 1
            return attend(q, k, v, mask, is_causal, dropout)

    assert "counting" in known
    decoder, memory = small_decoder("counting")
    decoder(torch.zeros(B, 2, 16, dtype=torch.float64), decoder.start(memory))
    assert Counting.calls == 4  # two layers, each to itself and to the source
    decoder(torch.zeros(B, 2, 16, dtype=torch.float64), memory)
    assert Counting.calls == 8


def test_unknown_kernels_and_those_that_do_not_run_here() -> None:
    with pytest.raises(UserError, match="'flash': unknown kernel; known: eager, flex, sdpa, varlen"):
        small_decoder("flash")
    with pytest.raises(UserError, match="'varlen': PyTorch has it on CUDA devices alone, not on cpu"):
        named_kernel("varlen", CPU)


def test_the_table_says_what_the_kernels_say() -> None:
    result = CliRunner().invoke(cli.app, ["memory", "--kernels"], catch_exceptions=False)
    rows = {line.split()[0]: " ".join(line.split()) for line in result.output.splitlines() if line}
    assert rows["eager"] == "eager always a tensor, the causal one too yes yes dense yes"
    assert rows["flex"] == "flex a function, and a block mask of it on CPUs no dense yes"
    assert rows["sdpa"] == "sdpa a tensor where one is needed, else none no no dense yes"
    assert rows["varlen"] == "varlen none: where sequences begin no no packed or dense no"
