"""Grouped-query attention (Ainslie et al. 2023): fewer key heads than query heads, and what else can be chosen.

Each of the `kv_heads` key heads serves `H / kv_heads` neighbouring query heads. Only the key heads are kept, and are
repeated when they are read. One key head is multi-query attention (Shazeer 2019), as many as query heads the usual one.
"""

from typing import Any, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from translator.attention.band import BandedKernel
from translator.attention.kernels import Kernel, merge_heads, split_heads
from translator.attention.multihead import CachedMultiheadAttention
from translator.attention.rotary import BASE, rotated
from translator.attention.sink import SinkKernel
from translator.attention.structure import AttentionStep, Product, Products, StateSpec
from translator.attention.written_out import by_token
from translator.config import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GroupedOptions:
    """`kv_heads` H_kv divides the query heads, None for as many; `rotary` turns queries and keys to their positions,
    with base 10,000 or the one given; `sink` gives each head a learned logit that takes attention and gives nothing."""

    kv_heads: int | None = Field(default=None, ge=1, le=256)
    rotary: bool | float = False
    sink: bool = False

    @property
    def rotary_base(self) -> float | None:
        """None without rotary positions."""
        return (BASE if self.rotary is True else float(self.rotary)) if self.rotary else None


class GroupedAttention(CachedMultiheadAttention):
    """`in_proj_weight` `(D + 2 H_kv D_head, D)` packs the projections of Q, K and V; `in_proj_bias` likewise.

    With fewer key heads than query heads that is not the shape of `nn.MultiheadAttention`'s, whose weights can't be
    loaded then: `load_state_dict` says so. Raises `ValueError` for heads that don't divide.
    """

    options: ClassVar[type] = GroupedOptions
    sink: nn.Parameter | None
    steps_alike = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        options: GroupedOptions | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first, device, dtype)
        chosen = options or self.options()
        self.kv_heads = chosen.kv_heads or num_heads
        self.width = embed_dim // num_heads
        self.base = chosen.rotary_base
        if num_heads % self.kv_heads:
            raise ValueError(f"{num_heads} query heads can't share {self.kv_heads} key heads evenly")
        if self.base is not None and (self.width % 2 or self.base <= 1):
            raise ValueError(f"rotary positions need an even head width, not {self.width}, and a base above 1")
        logits = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if chosen.sink else None
        self.register_parameter("sink", logits)
        if self.kv_heads != num_heads:
            packed = embed_dim + 2 * self.kv_heads * self.width
            self.in_proj_weight = nn.Parameter(torch.empty(packed, embed_dim, device=device, dtype=dtype))
            nn.init.xavier_uniform_(self.in_proj_weight)
            if bias:
                self.in_proj_bias = nn.Parameter(torch.zeros(packed, device=device, dtype=dtype))

    def products(self) -> dict[str, Product]:
        """`qkv` and `out_proj` for a self-attention, `q`, `kv` and `out_proj` for a cross-attention."""
        weight, bias, D = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        query, rest = (None, None) if bias is None else (bias[:D], bias[D:])
        return {
            "qkv": (weight, bias),
            "q": (weight[:D], query),
            "kv": (weight[D:], rest),
            "out_proj": (self.out_proj.weight, self.out_proj.bias),
        }

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A container of `spec.kind` for K and V `(rows, H_kv, slots, D_head)`."""
        weight = self.in_proj_weight
        return spec.key_value_state(rows, self.kv_heads, self.width, dtype=weight.dtype, device=weight.device)

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
        """See `Structure.attend`."""
        D, shared = self.embed_dim, self.kv_heads * self.width
        q, k, v = ops.product("qkv", x, norm=norm).split([D, shared, shared], dim=-1)
        q, k = self.turned(split_heads(q, self.num_heads), step), self.turned(split_heads(k, self.kv_heads), step)
        kernel = self.kernel(step, ops)
        attended = step.attend(q, k, split_heads(v, self.kv_heads), kernel, self.dropout_now())
        return ops.product("out_proj", merge_heads(attended), dropout=dropout, residual=residual)

    def turned(self, x: Tensor, step: AttentionStep) -> Tensor:
        """`x` `(rows, heads, T, D_head)` at the step's positions; as it is without rotary positions."""
        return x if self.base is None else rotated(x, step.positions, base=self.base)

    def kernel(self, step: AttentionStep, ops: Products) -> Kernel:
        """What attends: the engine's own kernel where nothing else was chosen."""
        return self.banded(ops.attention if self.sink is None else SinkKernel(self.sink), step)

    def banded(self, kernel: Kernel, step: AttentionStep) -> Kernel:
        """`kernel` kept to the band, where the step's own mask doesn't: a cache's does."""
        return kernel if self.band is None or step.state is not None else BandedKernel(kernel, self.band)

    def source_kv(self, memory: Tensor, ops: Products) -> tuple[Tensor, Tensor]:
        """K and V of the encoder output `(B, S, D)`, each `(B, H_kv, S, D_head)`."""
        k, v = ops.product("kv", memory).chunk(2, dim=-1)
        return split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)

    def reference(self, x: Tensor) -> Tensor:
        """See `CachedMultiheadAttention.reference`; the sink is a key more, of nothing."""
        return self.out_proj(by_token(*self.projected_plainly(x), self.band, self.sink))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given, errors = state_dict.get(prefix + "in_proj_weight"), rest[-1]
        usual = (3 * self.embed_dim, self.embed_dim)
        if self.kv_heads != self.num_heads and given is not None and tuple(given.shape) == usual:
            errors.append(
                f"{prefix}in_proj_weight {usual} has a key head for each query head, as nn.MultiheadAttention; grouped "
                f"attention of {self.kv_heads} key heads has {tuple(self.in_proj_weight.shape)} and can't be loaded "
                "from it"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)
