"""The kernels called with tensors, for tests: each function makes the structure of its call and runs it."""

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from translator.engine.native import library

Kernels = library.Kernels

ISAS = library.supported()
each_isa = pytest.mark.parametrize("isa", ISAS or [pytest.param("none", marks=pytest.mark.skip("no native kernels"))])


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    return None if tensor is None else tensor.data_ptr()


def token_stride(x: Tensor) -> int:
    """From one token of `(rows, T, heads, width)` to the next; the stride of a dimension of size one says nothing."""
    if x.shape[0] > 1:
        assert x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
        return x.stride(0) // x.shape[1]
    return x.stride(1)


def run(kernels: Kernels, structures: Sequence[ctypes.Structure], rows: int, threads: int = 1) -> None:
    """One program."""
    calls = (library.Call * len(structures))(*((ctypes.addressof(s), s.kind) for s in structures))
    kernels.run(calls, len(calls), rows, threads)


STORED = {library.FLOAT32: torch.float32, library.FLOAT16: torch.float16, library.BFLOAT16: torch.bfloat16}


def pack(kernels: Kernels, kind: int, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """A weight `(N, K)` and its bias packed, or None where they are refused."""
    N, K = weight.shape
    size = kernels.packed_bytes(kind, N, K)
    block = torch.empty(size + 63, dtype=torch.uint8)
    block = block[-block.data_ptr() % 64 :][:size]
    source = next(kind for kind, dtype in STORED.items() if dtype == weight.dtype)
    bad = kernels.pack(kind, N, K, address(weight.contiguous()), source, address(bias), address(block))
    return None if bad else block


def multiply(
    kernels: Kernels,
    kind: int,
    x: Tensor,  # (M, K), rows of any stride
    weight: Tensor | tuple[Tensor, int],  # (N, K); or packed, with N
    bias: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    activation: int = library.NO_ACTIVATION,
    residual: Tensor | None = None,  # (M, N)
    y: Tensor | None = None,  # (M, N), written; may be the residual
    steps: int = 1,
    threads: int = 1,
) -> Tensor:
    """`(M, N)`."""
    if isinstance(weight, Tensor):
        packed = pack(kernels, kind, weight, bias)
        assert packed is not None
        weight = packed, weight.shape[0]
    block, N = weight
    y = torch.full((len(x), N), float("nan")) if y is None else y
    call = library.Product(
        weights=address(block), x=address(x), gamma=address(gamma), beta=address(beta), residual=address(residual),
        y=address(y), ldx=x.stride(0), ldr=0 if residual is None else residual.stride(0), ldy=y.stride(0), type=kind,
        activation=activation, N=N, K=x.shape[1], T=steps, eps=eps,
    )  # fmt: skip
    run(kernels, [call], len(x) // steps, threads)
    return y


def attend_dense(
    kernels: Kernels,
    q: Tensor,  # (rows, T, H, D_head)
    k: Tensor,  # (sentences, H_kv, S, D_head), any strides but the last's
    v: Tensor,
    visible: Tensor | None = None,  # (sentences, S)
    *,
    causal: bool = False,
    threads: int = 1,
) -> Tensor:
    """`(rows, T, H, D_head)`."""
    rows, steps, heads, width = q.shape
    y = torch.full((rows, steps, heads, width), float("nan"))
    seen = None if visible is None else visible.to(torch.uint8).contiguous()
    call = library.Dense(
        q=address(q), k=address(k), v=address(v), visible=address(seen), y=address(y), ldq=token_stride(q),
        ldy=heads * width, k_sentence=k.stride(0), k_head=k.stride(1), k_key=k.stride(2), v_sentence=v.stride(0),
        v_head=v.stride(1), v_key=v.stride(2), H=heads, H_kv=k.shape[1], D_head=width, T=steps, S=k.shape[2],
        beams=rows // k.shape[0], causal=causal, scale=width**-0.5,
    )  # fmt: skip
    run(kernels, [call], rows, threads)
    return y


def attend_cached(
    kernels: Kernels,
    q: Tensor,  # (rows, T, H, D_head)
    k: Tensor,  # (rows, T, H_kv, D_head)
    v: Tensor,
    keys: Tensor,  # (buffer rows, H_kv, slots, D_head), written
    values: Tensor,
    lengths: Tensor,  # (rows,)
    origin: Tensor | None = None,  # (rows, at least the slots seen)
    home: Tensor | None = None,  # (rows,)
    *,
    threads: int = 1,
) -> Tensor:
    """`(rows, T, H, D_head)`."""
    rows, steps, heads, width = q.shape
    y = torch.full((rows, steps, heads, width), float("nan"))
    lengths, origin, home = (None if x is None else x.to(torch.int32).contiguous() for x in (lengths, origin, home))
    call = library.Cached(
        q=address(q), k=address(k), v=address(v), keys=address(keys), values=address(values), lengths=address(lengths),
        origin=address(origin), home=address(home), y=address(y), ldq=token_stride(q), ldk=token_stride(k),
        ldv=token_stride(v), ldy=heads * width, ld_origin=0 if origin is None else origin.shape[1], slots=keys.shape[2],
        H=heads, H_kv=k.shape[2], D_head=width, T=steps, scale=width**-0.5,
    )  # fmt: skip
    run(kernels, [call], rows, threads)
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """The same by the formula in fp64; k and v `(rows, H_kv, S, D_head)`, shown `(rows, T, S)`."""
    group = q.shape[2] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rthd,rhsd->rhts", q.double(), k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~shown.unsqueeze(1), float("-inf"))
    weights = torch.nan_to_num(scores.softmax(dim=-1))  # a query that sees nothing
    return torch.einsum("rhts,rhsd->rthd", weights, v)
