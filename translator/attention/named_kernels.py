"""Attention kernels by name: what a decoder in plain PyTorch attends with, and what each of them needs and gives.

A new kernel is a subclass of `AttentionKernel` with `@register_kernel`, and is chosen by `attention_kernel=` its name.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from translator.attention.kernels import attend
from translator.attention.masks import causal_mask
from translator.errors import UserError


class UnsupportedKernelOperation(NotImplementedError):
    """The kernel cannot do what was asked; the message names both."""


class AttentionKernel(ABC):
    """`softmax(q kᵀ / √D_head + mask) v`, as `translator.attention.kernels.attend` says, computed in one way.

    What is said of it (`mask`, `stores_scores`, `returns_weights`, `layouts`) is what `translator memory --kernels`
    prints.
    """

    name: ClassVar[str]
    mask: ClassVar[str]
    """What it takes to hide keys: `always a tensor`, …"""
    returns_weights: ClassVar[bool] = False
    """Whether `weighed` gives the weights too."""
    layouts: ClassVar[tuple[str, ...]] = ("dense",)
    """How K and V may lie: `dense` `(B, H_kv, S, D_head)`, `packed` one sequence after another."""

    def missing(self, device: torch.device) -> str:
        """Why it can't run on `device` here; empty where it can."""
        return ""

    @abstractmethod
    def stores_scores(self, device: torch.device) -> bool:
        """Whether the scores of all queries and keys, `(B, H, T, S)`, are in memory at once."""

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """`(B, H, T, D_head)` of q `(B, H, T, D_head)` and k, v `(B, H_kv, S, D_head)`.

        `mask` broadcasts to `(B, H, T, S)`: bool with True = visible, or floats to add. `is_causal`, without a mask:
        the last query sees all keys, each before it one fewer. Raises `UnsupportedKernelOperation`.
        """

    def weighed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The result and the weights `(B, H, T, S)`; raises `UnsupportedKernelOperation` for kernels without them."""
        having = [name for name, kernel in KERNELS.items() if kernel.returns_weights]
        raise self.cannot(f"return attention weights; {' and '.join(having)} can")

    def reads(self, *parts: Tensor) -> bool:
        """Whether it works on a cache in place: that is for an engine's own kernels."""
        return False

    def cannot(self, operation: str) -> UnsupportedKernelOperation:
        """The error to raise for what this kernel lacks."""
        return UnsupportedKernelOperation(f"attention kernel {self.name!r} cannot {operation}")


KERNELS: dict[str, AttentionKernel] = {}
"""Kernels by name."""

DEFAULT_KERNEL = "sdpa"

KernelClass = TypeVar("KernelClass", bound=type[AttentionKernel])


def register_kernel(kernel: KernelClass) -> KernelClass:
    """Class decorator: makes a kernel known under its `name`."""
    KERNELS[kernel.name] = kernel()
    return kernel


def named_kernel(name: str, device: torch.device) -> AttentionKernel:
    """The kernel of that name; raises `UserError` for an unknown one, and for one that can't run on `device` here."""
    if name not in KERNELS:
        raise UserError(f"attention_kernel = {name!r}: unknown kernel; known: {', '.join(sorted(KERNELS))}")
    missing = KERNELS[name].missing(device)
    if missing:
        raise UserError(f"attention_kernel = {name!r}: {missing}")
    return KERNELS[name]


def in_one_type(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`q` and a float mask in the type that K and V are kept in."""
    return q.to(k.dtype), mask if mask is None or mask.dtype == torch.bool else mask.to(k.dtype)


def repeated(part: Tensor, heads: int) -> Tensor:
    """`(B, H_kv, S, D_head)` → `(B, heads, S, D_head)`: each key head for its neighbouring query heads."""
    return part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], dim=1)


@register_kernel
class SdpaKernel(AttentionKernel):
    """PyTorch's `scaled_dot_product_attention`, which finds a fused kernel by itself: the default.

    Its own causal flag is aligned at the upper left, which is wrong for queries behind a filled cache: it is set for as
    many queries as keys alone, and never for a single query, which needs no mask at all.
    """

    name = "sdpa"
    mask = "a tensor where one is needed, else none"

    def stores_scores(self, device: torch.device) -> bool:
        """No: a fused kernel goes over the keys block by block."""
        return False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionKernel`."""
        T, S = q.shape[2], k.shape[2]
        if is_causal and T == 1:
            is_causal = False
        elif is_causal and T != S:
            mask, is_causal = ~causal_mask(T, S, q.device), False
        return attend(q, k, v, mask, is_causal, dropout)
