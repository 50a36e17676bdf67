"""Attention over sequences of any length that lie one after another: padding is taken out, not hidden."""

import importlib.util

import torch
from torch import Tensor

from translator.attention.named_kernels import AttentionKernel, in_one_type, register_kernel, repeated
from translator.attention.packed_pass import Packing

_MODULE = "torch.nn.attention.varlen"
TYPES = (torch.float16, torch.bfloat16)


@register_kernel
class VarlenKernel(AttentionKernel):
    """PyTorch's `varlen_attn`, in half precision on CUDA devices: told where each sequence begins."""

    name = "varlen"
    mask = "none: where sequences begin"
    layouts = ("packed", "dense")

    def stores_scores(self, device: torch.device) -> bool:
        """No: a fused kernel goes over the keys block by block."""
        return False

    def missing(self, device: torch.device) -> str:
        """See `AttentionKernel.missing`."""
        if not importlib.util.find_spec(_MODULE):
            return f"this PyTorch has no {_MODULE}"
        return "" if device.type == "cuda" else f"PyTorch has it on CUDA devices alone, not on {device.type}"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionKernel`; of masks it takes those `(B, 1, 1, S)` that show the first keys of each row."""
        B, H, T, _ = q.shape
        S, given = k.shape[2], q.dtype
        lengths = self._lengths(mask, B, S)
        self._check(k.dtype, dropout)
        q, _ = in_one_type(q, k, None)
        k, v = repeated(k, H), repeated(v, H)
        there = torch.arange(S, device=k.device) < lengths.unsqueeze(1)  # (B, S)
        keys, values = (part.transpose(1, 2)[there] for part in (k, v))  # (tokens, H, D_head)
        queries = q.transpose(1, 2).reshape(B * T, H, -1)
        starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
        found = varlen(queries, keys, values, starts, _starts(lengths), T, int(lengths.max()), is_causal)
        return found.view(B, T, H, -1).transpose(1, 2).to(given)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, queries: Packing, keys: Packing, is_causal: bool) -> Tensor:
        """`(1, H, N, D_head)` of q `(1, H, N, D_head)` and k, v `(1, H_kv, N_keys, D_head)`; see `PackedPass`."""
        self._check(k.dtype, 0.0)
        given = q.dtype
        q, _ = in_one_type(q, k, None)
        q, k, v = (part[0].transpose(0, 1) for part in (q, repeated(k, q.shape[1]), repeated(v, q.shape[1])))
        starts = (queries.starts.to(q.device), keys.starts.to(q.device))
        found = varlen(q, k, v, *starts, queries.widest, keys.widest, is_causal)
        return found.transpose(0, 1).unsqueeze(0).to(given)

    def _lengths(self, mask: Tensor | None, B: int, S: int) -> Tensor:
        if mask is None:
            return torch.full((B,), S)
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
            raise self.cannot(f"follow a mask {tuple(mask.shape)}: only which keys of a row are padding")
        shown = mask[:, 0, 0].expand(B, S)
        lengths = shown.sum(-1)
        if not bool((shown == (torch.arange(S, device=mask.device) < lengths.unsqueeze(1))).all()):
            raise self.cannot("follow a mask with hidden keys before visible ones")
        return lengths

    def _check(self, dtype: torch.dtype, dropout: float) -> None:
        if dtype not in TYPES:
            raise self.cannot(f"compute in {str(dtype).removeprefix('torch.')}, only in float16 and bfloat16")
        if dropout:
            raise self.cannot("drop attention weights: train without attention dropout")


def varlen(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int, is_causal: bool
) -> Tensor:
    """PyTorch's `varlen_attn` on q `(tokens, H, D_head)`, each sequence's causal mask aligned at its bottom right."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if is_causal else (-1, -1)
    return varlen_attn(q, k, v, q_starts, k_starts, longest_q, longest_k, window_size=window)  # type: ignore[return-value]


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
