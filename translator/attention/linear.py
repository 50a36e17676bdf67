"""Linear attention as a recurrence (Gated DeltaNet, Yang et al. 2024): a memory of constant size instead of a cache.

What is kept of a row, however long it is, is one memory matrix for each head and the last inputs of a short causal
convolution, which lets neighbouring tokens make a key or a query together. What was written long ago can be overwritten
or fade: what it costs is exact recall.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from translator.attention.delta_rule import delta_rule
from translator.attention.kernels import merge_heads, split_heads
from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure
from translator.config import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class LinearOptions:
    """`convolution`: how many tokens, itself included, a token's query, key and value are made from."""

    convolution: int = Field(default=4, ge=2, le=64)


class LinearAttention(Structure):
    """H heads with a memory `(D_head, D_head)` each, written by the gated delta rule."""

    options: ClassVar[type] = LinearOptions
    shareable = None

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
        options: LinearOptions | None = None,
    ) -> None:
        """There are no attention weights to drop: `dropout` is that of the layer around it."""
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        self.num_heads, self.width, self.batch_first = num_heads, embed_dim // num_heads, batch_first
        self.reach = (options or LinearOptions()).convolution
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, **factory)
        self.rates = nn.Linear(embed_dim, 2 * num_heads, bias=bias, **factory)
        self.gate = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.taps = nn.Parameter(torch.empty(self.reach, 3 * embed_dim, **factory))
        # exp(-exp(fading) softplus(x + onset)) is alpha: at first it forgets half within seven to hundreds of tokens.
        self.fading = nn.Parameter(torch.empty(num_heads, **factory))
        self.onset = nn.Parameter(torch.empty(num_heads, **factory))
        self.read_norm = nn.RMSNorm(self.width, eps=1e-6, **factory)
        nn.init.uniform_(self.taps, -(self.reach**-0.5), self.reach**-0.5)
        nn.init.uniform_(self.fading, -1.0, 0.0)
        nn.init.uniform_(self.onset, -5.0, -2.2)

    def products(self) -> dict[str, Product]:
        """`qkv`, `rates` (how much to forget and to write, of each head), `gate` of what was read, `out_proj`."""
        modules = {"qkv": self.qkv, "rates": self.rates, "gate": self.gate, "out_proj": self.out_proj}
        return {name: (module.weight, module.bias) for name, module in modules.items()}

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A `NamedState`: `memory` `(rows, H, D_head, D_head)`, and `inputs` `(rows, convolution - 1, 3 D)`.

        In fp32 at least, whatever K and V are kept in: a memory that is rounded at each token loses the small ones.
        """
        return spec.named_state(
            rows,
            {"memory": (self.num_heads, self.width, self.width), "inputs": (self.reach - 1, self.taps.shape[1])},
            dtype=torch.promote_types(self.taps.dtype, torch.float32),
            device=self.taps.device,
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
        """See `Structure.attend`; raises `ValueError` under any mask but the causal one."""
        qkv = step.apart(ops.product("qkv", x, norm=norm))  # (rows, T, 3 D)
        rates = step.apart(ops.product("rates", x, norm=norm))  # (rows, T, 2 H)
        gate = ops.product("gate", x, norm=norm)
        with torch.autocast(x.device.type, enabled=False):  # a recurrence adds up what it rounds
            read = self._recur(qkv, rates, step)
        read = step.together(merge_heads(read)).to(gate.dtype) * F.silu(gate)
        return ops.product("out_proj", read, dropout=dropout, residual=residual)

    def _recur(self, qkv: Tensor, rates: Tensor, step: AttentionStep) -> Tensor:
        """What T tokens read `(rows, H, T, D_head)`, normalised; the state, if there is one, is put after them."""
        state, wide, rows = step.state, torch.promote_types(qkv.dtype, torch.float32), len(qkv)
        if state is None:
            inputs = qkv.new_zeros(rows, self.reach - 1, qkv.shape[2], dtype=wide)
            memory = qkv.new_zeros(rows, self.num_heads, self.width, self.width, dtype=wide)
        else:
            inputs, memory = (state.current[name].to(wide) for name in ("inputs", "memory"))
        inputs, T = torch.cat([inputs, qkv.to(wide)], dim=1), qkv.shape[1]
        taps = self.taps.to(wide)
        mixed = sum(inputs[:, place : place + T] * taps[place] for place in range(self.reach))
        q, k, v = (split_heads(part, self.num_heads) for part in F.silu(mixed).chunk(3, dim=-1))  # type: ignore[arg-type]
        q, k = F.normalize(q, dim=-1) * self.width**-0.5, F.normalize(k, dim=-1)
        fade, write = rates.to(wide).transpose(1, 2).chunk(2, dim=1)  # (rows, H, T)
        log_alpha = -self.fading.to(wide).exp().unsqueeze(1) * F.softplus(fade + self.onset.to(wide).unsqueeze(1))
        read, memory = delta_rule(q, k, v, log_alpha, write.sigmoid(), memory)
        if state is not None:
            held = {"memory": memory, "inputs": inputs[:, T:]}
            state.put(step, **{name: part.to(state.current[name].dtype) for name, part in held.items()})
        return F.rms_norm(read, (self.width,), self.read_norm.weight.to(wide), self.read_norm.eps)

    def reference(self, x: Tensor) -> Tensor:
        """Token by token as the rule is written, every convolution and every head on its own."""
        qkv, rates, gate = self.qkv(x), self.rates(x), self.gate(x)
        rows, T = x.shape[:2]
        H, width = self.num_heads, self.width
        memory, outputs = x.new_zeros(rows, H, width, width), []
        for t in range(T):
            seen = range(max(0, t - self.reach + 1), t + 1)
            mixed = torch.stack([qkv[:, s] * self.taps[self.reach - 1 - t + s] for s in seen]).sum(0)
            q, k, v = (mixed * mixed.sigmoid()).view(rows, 3, H, width).unbind(1)
            heads = []
            for h in range(H):
                query = q[:, h] / q[:, h].norm(dim=-1, keepdim=True) / width**0.5
                key = (k[:, h] / k[:, h].norm(dim=-1, keepdim=True)).unsqueeze(2)  # (rows, D_head, 1)
                alpha = (-self.fading[h].exp() * torch.log1p((rates[:, t, h] + self.onset[h]).exp())).exp()
                beta = 1 / (1 + (-rates[:, t, H + h]).exp())
                held = alpha[:, None, None] * memory[:, h]
                lacking = v[:, h].unsqueeze(1) - key.transpose(1, 2) @ held  # (rows, 1, D_head)
                memory = memory.index_copy(
                    1, torch.tensor([h], device=x.device), (held + beta[:, None, None] * key @ lacking).unsqueeze(1)
                )
                read = (query.unsqueeze(1) @ memory[:, h]).squeeze(1)
                heads.append(read / (read.square().mean(-1, keepdim=True) + self.read_norm.eps).sqrt())
            outputs.append(torch.cat([head * self.read_norm.weight for head in heads], dim=-1))
        return self.out_proj(torch.stack(outputs, dim=1) * gate * gate.sigmoid())
