"""Traps of a KV cache, each as the wrong way that fails and the right way that passes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from translator.attention import KERNELS, UnsupportedKernelOperation, attend
from translator.attention.rotary import rotated
from translator.cache import CacheSpec, DecoderCache, SourceState

numeric = pytest.mark.numeric

H, WIDTH, S = 4, 8, 9


def tokens(length: int = S, heads: int = H, dtype: torch.dtype = torch.float64) -> Tensor:
    """`(1, heads, length, WIDTH)`."""
    return torch.randn(1, heads, length, WIDTH, dtype=dtype)


def cache_of(kind: str = "dynamic", heads: int = H, dtype: torch.dtype = torch.float64, **options) -> DecoderCache:
    """A stack of one layer, one row."""
    spec = CacheSpec(kind=kind, **options)
    state = spec.opened().key_value_state(1, heads, WIDTH, dtype=dtype, device=torch.device("cpu"))
    source = torch.zeros(1, heads, 1, WIDTH, dtype=dtype)
    return DecoderCache([state], [SourceState(source, source)], spec, batch_size=1)


def step(cache: DecoderCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One step of as many tokens as `k` has."""
    begun = cache.begin(k.shape[2])
    found = begun.layers[0].attend(q, k, v, attend)
    cache.commit(begun)
    return found


def one_by_one(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(1, dim=2)


def far(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) > 1e-3


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@numeric
def test_1_positions_are_turned_before_the_cache_never_behind_it() -> None:
    q, k, v = tokens(), tokens(), tokens()
    positions = torch.arange(S).unsqueeze(0)
    whole = attend(rotated(q, positions), rotated(k, positions), v, None, True)

    held = k[:, :, :0]
    for t, (new_q, new_k) in enumerate(zip(one_by_one(q), one_by_one(k), strict=True)):
        held = torch.cat([held, new_k], dim=2)
        held = rotated(held, positions[:, : t + 1])  # what came out of the cache is turned again with every step
        wrong = attend(rotated(new_q, positions[:, t : t + 1]), held, v[:, :, : t + 1], None)
    assert far(wrong, whole[:, :, -1:])

    cache = cache_of()
    for new_q, new_k, new_v in zip(*map(one_by_one, (q, k, v)), strict=True):
        place = cache.positions(1)
        right = step(cache, rotated(new_q, place), rotated(new_k, place), new_v)
    close(right, whole[:, :, -1:])


@numeric
def test_2_heads_are_repeated_behind_the_cache() -> None:
    q, k, v = tokens(heads=8), tokens(heads=2), tokens(heads=2)
    before, behind = cache_of(heads=8, capacity=S), cache_of(heads=2, capacity=S)
    repeated = [part.repeat_interleave(4, dim=1) for part in (k, v)]
    close(step(behind, q, k, v), step(before, q, *repeated))
    wrong, right = (cache.states[0].nbytes for cache in (before, behind))
    assert wrong == 4 * right  # H / H_kv times the bytes, for the same numbers


def compiled_steps(update: Callable[..., tuple[Tensor, ...]], state: tuple[Tensor, ...], steps: int) -> int:
    """How many graphs `update(new, position, *state)` takes over `steps` steps, shapes as they are."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(update, backend=count, dynamic=False)
    for position in range(steps):
        state = compiled(torch.ones(1, H, 1, WIDTH), torch.tensor([position]), *state)
    torch._dynamo.reset()
    return graphs


def test_3_a_growing_cache_is_another_graph_at_each_step() -> None:
    def growing(new: Tensor, position: Tensor, k: Tensor) -> tuple[Tensor]:
        return (torch.cat([k, new], dim=2),)

    def written(new: Tensor, position: Tensor, k: Tensor) -> tuple[Tensor]:
        return (k.index_copy_(2, position, new),)

    assert compiled_steps(growing, (torch.zeros(1, H, 1, WIDTH),), 4) == 4
    assert compiled_steps(written, (torch.zeros(1, H, 8, WIDTH),), 4) == 1


def test_3_the_static_container_keeps_its_addresses_and_the_growing_one_does_not() -> None:
    kept = {}
    for kind in ("static", "dynamic"):
        cache = cache_of(kind, capacity=None if kind == "dynamic" else 40)
        places = set()
        for new in one_by_one(tokens(40)):
            step(cache, new, new, new)
            places.add((cache.states[0].k.data_ptr(), tuple(cache.states[0].k.shape)))  # type: ignore[attr-defined]
        kept[kind] = len(places)
    assert kept["static"] == 1 < kept["dynamic"]


@numeric
def test_4_a_causal_flag_on_a_step_of_one_token_hides_all_but_the_first() -> None:
    q, k, v = tokens(), tokens(), tokens()
    whole = attend(q, k, v, None, True)
    wrong = F.scaled_dot_product_attention(q[:, :, -1:], k, v, is_causal=True)
    close(wrong, v[:, :, :1])  # it saw one key of nine
    assert far(wrong, whole[:, :, -1:])

    cache = cache_of()
    step(cache, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])
    begun = cache.begin(1)
    assert begun.layers[0].mask is None and not begun.layers[0].is_causal  # the future isn't in the cache: no mask
    right = begun.layers[0].attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], attend)
    close(right, whole[:, :, -1:])


@numeric
def test_5_a_prefix_on_a_filled_cache_is_aligned_at_the_bottom_right() -> None:
    q, k, v = tokens(), tokens(), tokens()
    whole, T = attend(q, k, v, None, True), 3
    wrong = F.scaled_dot_product_attention(q[:, :, -T:], k, v, is_causal=True)  # upper-left: row i sees keys 0 … i
    close(wrong, attend(q[:, :, -T:], k, v, torch.ones(T, S).tril().bool()))
    assert far(wrong, whole[:, :, -T:])

    cache = cache_of()
    step(cache, *(part[:, :, :-T] for part in (q, k, v)))
    mask, is_causal = cache.begin(T).layers[0].mask, cache.begin(T).layers[0].is_causal
    assert not is_causal and mask is not None
    assert torch.equal(mask, torch.ones(T, S).tril(S - T).bool())
    close(step(cache, *(part[:, :, -T:] for part in (q, k, v))), whole[:, :, -T:])


class Work(TorchDispatchMode):
    """Counts the operators called, and the bytes of what they make anew."""

    def __enter__(self) -> "Work":
        self.calls = self.made = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.calls += 1
        for part in found if isinstance(found, tuple | list) else (found,):
            if isinstance(part, Tensor) and part._base is None:
                self.made += part.nbytes
        return found


@numeric
def test_6_a_quantised_cache_saves_memory_and_not_work() -> None:
    q, k, v = tokens(1, dtype=torch.float32), tokens(200, dtype=torch.float32), tokens(200, dtype=torch.float32)
    scales = [part.abs().amax(dim=-1, keepdim=True) / 127 for part in (k, v)]
    codes = [(part / scale).round().to(torch.int8) for part, scale in zip((k, v), scales, strict=True)]

    with Work() as exact:
        expected = attend(q, k, v, None)
    with Work() as quantised:
        read = [code.float() * scale for code, scale in zip(codes, scales, strict=True)]  # at every step
        found = attend(q, *read, None)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)

    held = k.nbytes + v.nbytes
    assert sum(part.nbytes for part in (*codes, *scales)) < held / 2  # the right reason: half the memory or less
    # The wrong one: that a step gets cheaper. It calls more, and makes all of K and V anew.
    assert quantised.calls > exact.calls
    assert quantised.made >= exact.made + held


@numeric
def test_7_weights_are_asked_of_the_kernel_that_has_them() -> None:
    q, k, v = tokens(), tokens(), tokens()
    for fused in ("sdpa", "flex", "varlen"):
        with pytest.raises(UnsupportedKernelOperation, match="cannot return attention weights; eager can"):
            KERNELS[fused].weighed(q, k, v, None, True)
    found, weights = KERNELS["eager"].weighed(q, k, v, None, True)
    close(found, KERNELS["sdpa"](q, k, v, None, True))  # the same attention, with what the fused kernel never had
    close(weights.sum(-1), torch.ones(1, H, S, dtype=torch.float64))
    assert not weights.triu(1).any()
