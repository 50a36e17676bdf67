"""Packed multi-head attention, the default structure: `nn.MultiheadAttention`'s parameters, taken apart.

`nn.MultiheadAttention` keeps K and V out of reach between projecting and attending, which is where a cache belongs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention.band import Band
from translator.attention.kernels import merge_heads, split_heads
from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure
from translator.attention.written_out import by_token, turned_plainly


class CachedMultiheadAttention(Structure):
    """The parameters of `nn.MultiheadAttention` under the same names, with each product callable on its own.

    `in_proj_weight` `(3 D, D)` and `in_proj_bias` `(3 D,)` stay packed; Q, K and V are views of them at run time.
    """

    steps_alike = True
    shareable = True
    base: float | None = None
    """How much slower the last pair of a rotary head turns than the first; None without rotary positions."""
    band: Band | None = None
    """What a query sees at most; None for everything before it."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first  # read by nn.TransformerDecoder when it holds these layers
        # In the order of nn.MultiheadAttention, so that the same seed gives the same weights.
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, device=device, dtype=dtype))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    # -- products: what an engine may compute in another way --------------------------------------------------------

    def products(self) -> dict[str, Product]:
        """`qkv` and `out_proj` of self-attention; `q`, `kv` and `out_proj` of cross-attention."""
        D, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        query, rest = (None, None) if bias is None else (bias[:D], bias[D:])
        return {
            "qkv": (weight, bias),
            "q": (weight[:D], query),
            "kv": (weight[D:], rest),
            "out_proj": (self.out_proj.weight, self.out_proj.bias),
        }

    def qkv(self, x: Tensor) -> Tensor:
        """`(B, T, D)` → `(B, T, 3 D)`: Q, K and V side by side."""
        return F.linear(x, self.in_proj_weight, self.in_proj_bias)

    def q(self, x: Tensor) -> Tensor:
        """`(B, T, D)` → Q `(B, T, D)`, with the first third of the packed weight."""
        bias = self.in_proj_bias
        return F.linear(x, self.in_proj_weight[: self.embed_dim], None if bias is None else bias[: self.embed_dim])

    def kv(self, memory: Tensor) -> Tensor:
        """`(B, S, D)` → `(B, S, 2 D)`: K and V side by side, with the other two thirds."""
        bias = self.in_proj_bias
        return F.linear(memory, self.in_proj_weight[self.embed_dim :], None if bias is None else bias[self.embed_dim :])

    # -- as self-attention -------------------------------------------------------------------------------------------

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A container of `spec.kind` for K and V `(rows, H, slots, D_head)`."""
        weight = self.in_proj_weight
        return spec.key_value_state(
            rows, self.num_heads, self.embed_dim // self.num_heads, dtype=weight.dtype, device=weight.device
        )

    def attend(
        self,
        x: Tensor,
        step: AttentionStep,
        ops: Products,
        *,
        norm: str | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`x` `(rows, T, D)` attends to itself and to what came before it; see `Structure.attend`."""
        qkv = ops.product("qkv", x, norm=norm)  # (rows, T, 3 D)
        q, k, v = (split_heads(part, self.num_heads) for part in qkv.chunk(3, dim=-1))
        attended = step.attend(q, k, v, ops.attention, self.dropout_now())  # (rows, H, T, D_head)
        return ops.product("out_proj", merge_heads(attended), dropout=dropout, residual=residual)

    def reference(self, x: Tensor) -> Tensor:
        """Token by token, over no more keys than the token sees."""
        return self.out_proj(by_token(*self.projected_plainly(x), self.band))

    def projected_plainly(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q `(rows, T, H, D_head)`, K and V `(rows, T, H_kv, D_head)` of `x` `(rows, T, D)`, for `reference`."""
        D, bias = self.embed_dim, self.in_proj_bias
        width = D // self.num_heads
        packed = x @ self.in_proj_weight.T
        packed = (packed if bias is None else packed + bias).unflatten(-1, (-1, width))
        q, rest = packed[:, :, : self.num_heads], packed[:, :, self.num_heads :]
        k, v = rest.chunk(2, dim=2)
        return turned_plainly(q, self.base), turned_plainly(k, self.base), v

    # -- as cross-attention ------------------------------------------------------------------------------------------

    def source_kv(self, memory: Tensor, ops: Products) -> tuple[Tensor, Tensor]:
        """K and V of the encoder output `(B, S, D)`, each `(B, H, S, D_head)`."""
        k, v = ops.product("kv", memory).chunk(2, dim=-1)
        return split_heads(k, self.num_heads), split_heads(v, self.num_heads)

    def attend_source(
        self,
        x: Tensor,
        step: AttentionStep,
        ops: Products,
        *,
        norm: str | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`x` `(rows, T, D)` attends to the source; see `Structure.attend`."""
        k, v, mask = step.source(lambda memory: self.source_kv(memory, ops))
        # The K beams of a sentence are K * T query rows against one copy of its keys: (B * K, T, D) -> (B, K * T, D).
        B, beams = k.shape[0], x.shape[0] // max(k.shape[0], 1)
        q = split_heads(ops.product("q", x, norm=norm).view(B, beams * x.shape[1], x.shape[2]), self.num_heads)
        attended = step.attend_source(q, k, v, mask, ops.attention, self.dropout_now())
        return ops.product("out_proj", merge_heads(attended).view_as(x), dropout=dropout, residual=residual)

    # ----------------------------------------------------------------------------------------------------------------

    def dropout_now(self) -> float:
        """The dropout probability on attention weights: 0 in eval mode."""
        return self.dropout if self.training else 0.0
