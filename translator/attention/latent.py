"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): a short latent a token is kept, and expanded when read.

What a cache holds of a token is a latent of `kv_rank` numbers, from which the keys and values of all heads are made,
and one rotary key of `rotary_width` numbers that all heads share: a rotation can't be moved past the expansion, so that
part stays out of it. Both are cached as they are, with a single head; the expansion comes after.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from translator.attention.kernels import merge_heads, split_heads
from translator.attention.rotary import rotated
from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure
from translator.config import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LatentOptions:
    """`kv_rank` and `rotary_width` are what is kept of a token, in numbers; `absorbed`: a step of one token reads the
    latents as they are instead of expanding all that are held."""

    kv_rank: int = Field(default=64, ge=1, le=8192)
    rotary_width: int = Field(default=16, ge=2, le=1024)
    absorbed: bool = True

    @field_validator("rotary_width")
    @classmethod
    def _check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even: rotary positions turn pairs of numbers")
        return value


class LatentAttention(Structure):
    """H heads with keys `D_head + rotary_width` wide and values `D_head` wide, `D_head = D / H`."""

    options: ClassVar[type] = LatentOptions

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
        options: LatentOptions | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        chosen = options or LatentOptions()
        self.num_heads, self.width = num_heads, embed_dim // num_heads
        self.rank, self.rotary, self.absorbed = chosen.kv_rank, chosen.rotary_width, chosen.absorbed
        self.dropout, self.batch_first = dropout, batch_first
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q = nn.Linear(embed_dim, num_heads * (self.width + self.rotary), bias=bias, **factory)
        self.down = nn.Linear(embed_dim, self.rank + self.rotary, bias=bias, **factory)
        self.latent_norm = nn.RMSNorm(self.rank, eps=1e-6, **factory)
        self.up = nn.Linear(self.rank, num_heads * 2 * self.width, bias=False, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

    def products(self) -> dict[str, Product]:
        """`q`, `down` to latent and rotary key, `up` to the heads' keys and values, `out_proj`."""
        modules = {"q": self.q, "down": self.down, "up": self.up, "out_proj": self.out_proj}
        return {name: (module.weight, module.bias) for name, module in modules.items()}

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A container of one head: latents `(rows, 1, slots, kv_rank)` as its keys, rotary keys as its values."""
        weight = self.down.weight
        return spec.key_value_state(
            rows, 1, self.rank, value_width=self.rotary, dtype=weight.dtype, device=weight.device
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
        """See `Structure.attend`."""
        positions = step.positions
        q = split_heads(ops.product("q", x, norm=norm), self.num_heads)
        plain, turned = q.split([self.width, self.rotary], dim=-1)
        q = torch.cat([plain, rotated(turned, positions)], dim=-1)  # (rows, H, T, D_head + rotary_width)
        latent, key = ops.product("down", x, norm=norm).split([self.rank, self.rotary], dim=-1)
        scale = self.latent_norm.weight.to(latent.dtype)
        latent = F.rms_norm(latent, (self.rank,), scale, self.latent_norm.eps).unsqueeze(1)  # (rows, 1, T, kv_rank)
        key = rotated(key.unsqueeze(1), positions)
        kernel = _Expanding(self, ops)
        attended = step.attend(q, latent, key, kernel, self.dropout if self.training else 0.0)
        return ops.product("out_proj", merge_heads(attended), dropout=dropout, residual=residual)

    def reference(self, x: Tensor) -> Tensor:
        """Token by token and head by head, each with keys and values expanded from the latents up to it."""
        T, H, width = x.shape[1], self.num_heads, self.width
        positions = torch.arange(T, device=x.device).unsqueeze(0)
        q = self.q(x).unflatten(-1, (H, width + self.rotary))
        q = torch.cat([q[..., :width], rotated(q[..., width:].transpose(1, 2), positions).transpose(1, 2)], dim=-1)
        down = self.down(x)
        rotary = rotated(down[..., self.rank :].unsqueeze(1), positions)[:, 0]  # (rows, T, rotary_width)
        expanded = self.up(self.latent_norm(down[..., : self.rank])).unflatten(-1, (H, 2, width))
        outputs = []
        for t in range(T):
            heads = []
            for h in range(H):
                keys = torch.cat([expanded[:, : t + 1, h, 0], rotary[:, : t + 1]], dim=-1)  # (rows, t + 1, …)
                scores = (keys @ q[:, t, h].unsqueeze(-1)).squeeze(-1) / math.sqrt(width + self.rotary)
                heads.append((scores.softmax(-1).unsqueeze(1) @ expanded[:, : t + 1, h, 1]).squeeze(1))
            outputs.append(torch.cat(heads, dim=-1))
        return self.out_proj(torch.stack(outputs, dim=1))


class _Expanding:
    """A kernel over latents `(rows, 1, S, kv_rank)` and rotary keys `(rows, 1, S, rotary_width)`, as a cache shows
    them, in the place of K and V."""

    def __init__(self, structure: LatentAttention, ops: Products) -> None:
        self.structure = structure
        self.ops = ops

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """`(rows, H, T, D_head)`."""
        structure = self.structure
        whole = mask is None or mask.dim() < 4 or mask.shape[1] == 1  # one for all heads
        there = not structure.up.weight.is_meta  # an engine that has packed it may have let it go
        if structure.absorbed and q.shape[2] == 1 and whole and there:
            return self._absorbed(q, k, v, mask, dropout)
        latents, rotary = k.to(q.dtype), v.to(q.dtype)
        expanded = self.ops.product("up", latents[:, 0])  # (rows, S, H * 2 * D_head)
        keys, values = split_heads(expanded, structure.num_heads).chunk(2, dim=-1)
        keys = torch.cat([keys, rotary.expand(-1, structure.num_heads, -1, -1)], dim=-1)
        return self.ops.attention(q, keys, values, mask, is_causal, dropout)

    def reads(self, *parts: Tensor) -> bool:
        """Nothing in place: what a cache holds isn't keys and values yet."""
        return False

    def _absorbed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """One token's attention over latents: the key part of `up` goes to the query, the value part to the result.

        `q · (W_k c) = (W_kᵀ q) · c`, and a weighted sum of `W_v c` is `W_v` times that of c. The heads become the
        queries of one head, since all of them read the same latents.
        """
        structure = self.structure
        up = structure.up.weight.to(q.dtype).view(structure.num_heads, 2, structure.width, structure.rank)
        plain, turned = q.split([structure.width, structure.rotary], dim=-1)
        q = torch.cat([plain @ up[:, 0], turned], dim=-1)  # (rows, H, 1, kv_rank + rotary_width)
        # The kernel divides by √(kv_rank + rotary_width), and these scores are of narrower keys.
        q = q * math.sqrt((structure.rank + structure.rotary) / (structure.width + structure.rotary))
        latents = k.to(q.dtype)
        keys = torch.cat([latents, v.to(q.dtype)], dim=-1)
        summed = self.ops.attention(q.transpose(1, 2), keys, latents, mask, False, dropout)  # (rows, 1, H, kv_rank)
        return summed.transpose(1, 2) @ up[:, 1].transpose(1, 2)
