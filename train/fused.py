"""The operations of a training step, each with its backward pass by hand, around the native kernels (`training.cpp`).

Plain autograd keeps a tensor and makes a pass over memory for every small step between two matrix products: norms,
casts, biases, activations, dropout, residuals. Here there is one pass each way. Matrix products stay PyTorch's.
"""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from translator.attention import Packing
from translator.engine.native.library import BFLOAT16, FLOAT32, Kernels, PackedAttention

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class Step:
    """What the operations of one step share: kernels, the type of activations, and the seeds of dropout's masks."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, seed: int = 0) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self.type = TYPES[dtype]
        self._seed = seed

    def next_seed(self) -> int:
        """Of the next mask."""
        self._seed = (self._seed * 747796405 + 2891336453) % 2**32
        return self._seed

    @property
    def threads(self) -> int:
        """How many a kernel takes."""
        return torch.get_num_threads()


class Norm(torch.autograd.Function):
    """`(N, D)` fp32 → LayerNorm `(N, D)` in the step's type (Ba et al. 2016)."""

    @staticmethod
    def forward(ctx, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, step: Step) -> Tensor:  # type: ignore[no-untyped-def]
        y, statistics = _normed(x, gamma, beta, eps, step)
        ctx.save_for_backward(x, gamma, statistics)
        ctx.step = step
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gamma, statistics = ctx.saved_tensors
        return *_norm_back(grad.contiguous(), x, gamma, statistics, ctx.step), None, None


class Embed(torch.autograd.Function):
    """`dropout(table[ids] · scale + positions)`: ids `(N,)`, table `(V, D)`, positions `(N, D)` → `(N, D)` fp32."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, ids: Tensor, table: Tensor, positions: Tensor, scale: float, threshold: int, step: Step
    ) -> Tensor:
        x = torch.add(positions, table.index_select(0, ids), alpha=scale)
        seed = step.next_seed() if threshold else 0
        ctx.save_for_backward(ids)
        ctx.rows, ctx.scale, ctx.mask, ctx.step = len(table), scale, (seed, threshold), step
        return _dropped(x, ctx.mask, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        grad = _dropped(grad.contiguous(), ctx.mask, ctx.step)
        table = grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, ids, grad, alpha=ctx.scale)
        return None, table, grad, None, None, None


def _dropped(x: Tensor, mask: tuple[int, int], step: Step) -> Tensor:
    seed, threshold = mask
    if not threshold:
        return x
    y = torch.empty_like(x)
    step.kernels.train_residual_back(x.data_ptr(), x.numel(), seed, threshold, y.data_ptr(), FLOAT32, step.threads)
    return y


class Product(torch.autograd.Function):
    """`norm(x) Wᵀ + b` with ReLU and dropout, or dropout and a residual, behind it.

    x is `(N, K)`: fp32 where it is normed, else of the step's type. `weight`, `bias` are the parameters (or parts of
    them) that gradients go to, `cast`, `cast_bias` their copies in the step's type. With a residual `(N, M)` fp32 the
    result is fp32, else of the step's type. `threshold` is dropout's, of 256.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        cast: Tensor,
        cast_bias: Tensor | None,
        eps: float,
        relu: bool,
        threshold: int,
        step: Step,
    ) -> Tensor:
        statistics = None
        h = x
        if gamma is not None:
            assert beta is not None
            h, statistics = _normed(x, gamma, beta, eps, step)
        elif x.dtype != step.dtype:
            h = x.to(step.dtype)
        y = torch.mm(h, cast.t()) if cast_bias is None else torch.addmm(cast_bias, h, cast.t())
        seed = step.next_seed() if threshold else 0
        if relu:
            step.kernels.train_relu(y.data_ptr(), step.type, y.numel(), seed, threshold, step.threads)
        out = y
        if residual is not None:
            out = torch.empty_like(residual)
            step.kernels.train_residual(
                *(y.data_ptr(), step.type, residual.data_ptr(), y.numel(), seed, threshold, out.data_ptr()),
                step.threads,
            )
        ctx.save_for_backward(h, cast, y if relu else None, x if gamma is not None else None, gamma, statistics)
        ctx.step, ctx.seed, ctx.threshold, ctx.relu = step, seed, threshold, relu
        ctx.has_residual, ctx.has_bias, ctx.given = residual is not None, bias is not None, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, cast, y, x, gamma, statistics = ctx.saved_tensors
        step, kernels = ctx.step, ctx.step.kernels
        grad = grad.contiguous()
        if ctx.has_residual:
            dy = torch.empty(grad.shape, dtype=step.dtype)
            kernels.train_residual_back(
                *(grad.data_ptr(), grad.numel(), ctx.seed, ctx.threshold, dy.data_ptr(), step.type), step.threads
            )
        elif ctx.relu:
            dy = grad.clone() if grad.dtype == step.dtype else grad.to(step.dtype)
            kernels.train_relu_back(*(y.data_ptr(), dy.data_ptr(), step.type, dy.numel(), ctx.threshold), step.threads)
        else:
            dy = grad
        dweight = torch.mm(dy.t(), h).float()
        dbias = dy.sum(dim=0, dtype=torch.float32) if ctx.has_bias else None
        dx = torch.mm(dy, cast)
        dgamma = dbeta = None
        if gamma is not None:
            dx, dgamma, dbeta = _norm_back(dx, x, gamma, statistics, step)
        elif ctx.given != dx.dtype:
            dx = dx.to(ctx.given)
        return dx, dweight, dbias, dgamma, dbeta, grad if ctx.has_residual else None, *(None,) * 6


class Attention(torch.autograd.Function):
    """Attention over packed sentences, on views of products: q `(1, H, N, D_head)`, k, v `(1, H, N_keys, D_head)`."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, is_causal: bool, step: Step
    ) -> Tensor:
        _, heads, count, width = q.shape
        y = torch.empty(count, heads, width, dtype=q.dtype)
        call = _attention(q, k, v, y, queries, keys, is_causal, step)
        step.kernels.packed_attention(byref(call), 0, step.threads)
        ctx.save_for_backward(q, k, v)
        ctx.queries, ctx.keys, ctx.is_causal, ctx.step = queries, keys, is_causal, step
        return _by_head(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()[0]  # (N, H, D_head)
        found = [torch.empty(part.shape[2], part.shape[1], part.shape[3], dtype=q.dtype) for part in (q, k, v)]
        call = _attention(q, k, v, grad, ctx.queries, ctx.keys, ctx.is_causal, ctx.step)
        (call.dq, call.dk, call.dv), width = (part.data_ptr() for part in found), q.shape[1] * q.shape[3]
        call.ld_dq = call.ld_dk = call.ld_dv = width
        ctx.step.kernels.packed_attention(byref(call), 1, ctx.step.threads)
        return *(_by_head(part) for part in found), None, None, None, None


class Loss(torch.autograd.Function):
    """The smoothed cross entropy of `hidden` `(N, D)` by the output weight `(V, D)`, summed and times `scale`.

    Logits and their gradient are one block of memory, the widest of a step.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, cast: Tensor, target: Tensor, smoothing: float, scale: float, step: Step
    ) -> Tensor:
        h = hidden.to(step.dtype)
        logits = torch.mm(h, cast.t())
        losses = torch.empty(len(target), dtype=torch.float64)
        step.kernels.train_loss(
            *(logits.data_ptr(), step.type, *logits.shape, target.data_ptr(), smoothing, scale, losses.data_ptr()),
            step.threads,
        )
        ctx.save_for_backward(h, cast, logits)
        ctx.given = hidden.dtype
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, cast, slope = ctx.saved_tensors
        dhidden, dweight = torch.mm(slope, cast).to(ctx.given), torch.mm(slope.t(), h).float()
        factor = float(grad)
        if factor != 1:
            dhidden, dweight = dhidden * factor, dweight * factor
        return dhidden, dweight, None, None, None, None, None


def _normed(x: Tensor, gamma: Tensor, beta: Tensor, eps: float, step: Step) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=step.dtype)
    statistics = torch.empty(2, rows)
    step.kernels.train_norm(
        *(x.data_ptr(), gamma.data_ptr(), beta.data_ptr(), eps, rows, width, step.type, y.data_ptr()),
        *(statistics[0].data_ptr(), statistics[1].data_ptr(), step.threads),
    )
    return y, statistics


def _norm_back(dy: Tensor, x: Tensor, gamma: Tensor, statistics: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
    step.kernels.train_norm_back(
        *(dy.data_ptr(), step.type, x.data_ptr(), gamma.data_ptr()),
        *(statistics[0].data_ptr(), statistics[1].data_ptr(), *x.shape),
        *(dx.data_ptr(), dgamma.data_ptr(), dbeta.data_ptr(), step.threads),
    )
    return dx, dgamma, dbeta


def _by_head(x: Tensor) -> Tensor:
    """`(N, H, D_head)` → `(1, H, N, D_head)`, a view."""
    return x.unsqueeze(0).transpose(1, 2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, queries: Packing, keys: Packing, is_causal: bool, step: Step
) -> PackedAttention:
    for part in (q, k, v):
        assert part.stride(3) == 1 and part.stride(1) == part.shape[3]
    return PackedAttention(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        y=y.data_ptr(),
        q_starts=queries.starts.data_ptr(),
        k_starts=keys.starts.data_ptr(),
        ldq=q.stride(2),
        ldk=k.stride(2),
        ldv=v.stride(2),
        ldy=y.shape[1] * y.shape[2],
        sentences=len(queries.lengths),
        type=step.type,
        H=q.shape[1],
        D_head=q.shape[3],
        causal=is_causal,
        scale=q.shape[3] ** -0.5,
    )
