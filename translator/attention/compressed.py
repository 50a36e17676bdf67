"""Attention over compressed entries and a window of the newest tokens, as DeepSeek-V4's layers have it.

Keys are values, and there is one head of them. Every `rate` tokens become one entry (`translator.attention.folding`),
at the place of the first of them; a token sees the last `window` tokens as they are and all entries complete by then.
At a light rate there are many entries, and an indexer chooses for each token the `top_k` of them it sees.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from translator.attention.folding import fold
from translator.attention.kernels import merge_heads, split_heads
from translator.attention.rotary import rotated
from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure
from translator.config import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CompressedOptions:
    """`rate` tokens make an entry; a token sees `top_k` entries, or with 0 all of them; and the last `window` tokens.

    With `top_k`, entries overlap, and `index_heads` of `index_width` score them. DeepSeek-V4 has layers of rate 4 with
    an indexer, and of rate 128 without.
    """

    rate: int = Field(default=4, ge=2, le=4096)
    top_k: int = Field(default=16, ge=0, le=65_536)
    window: int = Field(default=32, ge=1, le=65_536)
    index_heads: int = Field(default=2, ge=1, le=256)
    index_width: int = Field(default=16, ge=1, le=1024)


class CompressedAttention(Structure):
    """H query heads over one head of keys that are values too, `D_head = D / H` wide."""

    options: ClassVar[type] = CompressedOptions

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
        options: CompressedOptions | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        chosen = options or CompressedOptions()
        self.num_heads, self.width = num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.rate, self.window, self.top_k = chosen.rate, chosen.window, chosen.top_k
        self.turning = self.width // 4 * 2  # numbers of a head that carry the position, an even half of them
        self.index_heads, self.index_width = (chosen.index_heads, chosen.index_width) if self.top_k else (0, 0)
        self.series, self.entry = (2 if self.top_k else 1), self.width + self.index_width
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.kv = nn.Linear(embed_dim, self.width, bias=bias, **factory)
        self.fold = nn.Linear(embed_dim, 2 * self.series * self.entry, bias=bias, **factory)
        if self.top_k:
            self.index = nn.Linear(embed_dim, self.index_heads * (self.index_width + 1), bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.place_gates = nn.Parameter(torch.zeros(self.rate, self.series, self.entry, **factory))
        self.kv_norm = nn.RMSNorm(self.width, eps=1e-6, **factory)
        self.entry_norm = nn.RMSNorm(self.width, eps=1e-6, **factory)

    def products(self) -> dict[str, Product]:
        """`q`, `kv`, `fold` (values and gates of entries), `index` (queries and weights, where entries are chosen),
        `out_proj`."""
        names = ("q", "kv", "fold", "index", "out_proj") if self.top_k else ("q", "kv", "fold", "out_proj")
        modules = {name: self.get_submodule(name) for name in names}
        return {name: (module.weight, module.bias) for name, module in modules.items()}  # type: ignore[misc]

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A `CompressedState`: entries with their index keys, `window` `(rows, window - 1, D_head)`, `partial`
        `(rows, rate - 1, 2, series, …)` and, where windows overlap, `previous` `(rows, rate, 2, …)`.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "window": (self.window - 1, self.width),
            "partial": (self.rate - 1, 2, self.series, self.entry),
        }
        if self.series == 2:
            shapes["previous"] = (self.rate, 2, self.entry)
        weight = self.place_gates
        return spec.compressed_state(
            rows, shapes, rate=self.rate, width=self.entry, dtype=weight.dtype, device=weight.device
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
        q = split_heads(step.apart(ops.product("q", x, norm=norm)), self.num_heads)
        kv = step.apart(ops.product("kv", x, norm=norm))  # (rows, T, D_head)
        tokens = step.apart(ops.product("fold", x, norm=norm))
        asked = step.apart(ops.product("index", x, norm=norm)) if self.top_k else None
        T, state = q.shape[2], step.state
        positions = torch.arange(T, device=x.device).unsqueeze(0) if state is None else step.positions  # (rows or 1, T)
        q = self._turned(q, positions)
        kv = self._turned(_normed(kv, self.kv_norm).unsqueeze(1), positions)[:, 0]
        newest, entries = self._remembered(kv, tokens, positions, step)
        mask = self._mask(asked, entries, positions, newest.shape[1])
        keys = torch.cat([newest, entries[..., : self.width]], dim=1).to(q.dtype).unsqueeze(1)
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        attended = ops.attention(q, keys, keys, mask.unsqueeze(1), False, self.dropout if self.training else 0.0)
        # Values carry positions, being keys: turned back, a sum of them says how far away they stood.
        attended = self._turned(attended, positions, back=True)
        return ops.product("out_proj", step.together(merge_heads(attended)), dropout=dropout, residual=residual)

    def _remembered(self, kv: Tensor, tokens: Tensor, positions: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """The newest keys `(rows, window - 1 + T, D_head)` and all entries `(rows, E, …)`, these T tokens included."""
        state, rows = step.state, len(kv)
        tokens = tokens.unflatten(-1, (2, self.series, self.entry))
        gates = tokens[:, :, 1] + self.place_gates[positions % self.rate]
        tokens = torch.stack([tokens[:, :, 0].to(gates.dtype), gates], dim=2)
        held = positions[:, 0].expand(rows)
        if state is None:  # nothing stands before a whole sequence
            window = kv[:, :0]
            partial = tokens.new_zeros(rows, self.rate - 1, *tokens.shape[2:])
            previous = tokens.new_zeros(rows, self.rate, 2, self.entry) if self.series == 2 else None
        else:
            window, partial, previous = (state.current.get(name) for name in ("window", "partial", "previous"))
            previous = None if previous is None else previous.to(tokens.dtype)
        newest = torch.cat([window.to(kv.dtype), kv], dim=1)
        folded = fold(tokens, partial, previous, held, self.rate)
        vectors, index_keys = folded.entries.split([self.width, self.index_width], dim=-1)
        places = (held // self.rate).unsqueeze(1) + torch.arange(vectors.shape[1], device=kv.device)
        vectors = self._turned(_normed(vectors, self.entry_norm).unsqueeze(1), places * self.rate)[:, 0]
        entries = torch.cat([vectors, index_keys], dim=-1)
        if state is None:
            return newest, entries
        entries = state.emit(step, entries)
        after = {"window": newest[:, newest.shape[1] - self.window + 1 :], "partial": folded.partial}
        if folded.previous is not None:
            after["previous"] = folded.previous
        state.put(step, **{name: part.to(state.current[name].dtype) for name, part in after.items()})
        return newest, entries

    def _mask(self, asked: Tensor | None, entries: Tensor, positions: Tensor, newest: int) -> Tensor:
        """`(rows or 1, T, newest + E)`: what tokens at `positions` see, as `scaled_dot_product_attention` takes it.

        With an indexer its scores are added to attention's, which is how it learns what is worth seeing.
        """
        T, E = positions.shape[1], entries.shape[1]
        queries = positions.unsqueeze(2)  # (rows or 1, T, 1)
        keys = queries[:, :1] - (newest - T) + torch.arange(newest, device=positions.device)
        near = (keys >= 0) & (keys <= queries) & (keys > queries - self.window)
        complete = (torch.arange(E, device=positions.device) + 1) * self.rate <= queries + 1
        if asked is None:
            return torch.cat([near, complete], dim=-1)
        scores = self._index_scores(asked, entries[..., self.width :]).masked_fill(~complete, -torch.inf)
        scores = best(scores, self.top_k)
        added = torch.zeros_like(near, dtype=scores.dtype).masked_fill_(~near, -torch.inf)
        return torch.cat([added.expand(len(scores), -1, -1), scores], dim=-1)

    def _index_scores(self, asked: Tensor, index_keys: Tensor) -> Tensor:
        """`(rows, T, E)`: weighted sums of softplus(query · key) over the indexer's heads.

        DeepSeek's has a rectifier there, whose zeros are ties that a cut through them would break by chance.
        """
        queries, weights = asked.split([self.index_heads * self.index_width, self.index_heads], dim=-1)
        queries = split_heads(queries.contiguous(), self.index_heads)  # (rows, H_index, T, index_width)
        products = queries @ index_keys.to(queries.dtype).unsqueeze(1).transpose(-1, -2) * self.index_width**-0.5
        weighted = F.softplus(products) * weights.transpose(1, 2).unsqueeze(3)
        return weighted.sum(dim=1) * self.index_heads**-0.5

    def _turned(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """`x` `(rows, H, T, D_head)` with its last numbers turned to their positions, or back from them."""
        plain, turning = x.split([self.width - self.turning, self.turning], dim=-1)
        return torch.cat([plain, rotated(turning, positions, back=back)], dim=-1)

    def reference(self, x: Tensor) -> Tensor:
        """Token by token: the entries complete by then made anew from their tokens, ranked, and attended to."""
        rows, T = x.shape[:2]
        at = torch.arange(T, device=x.device).unsqueeze(0)
        q = self._turned(self.q(x).unflatten(-1, (self.num_heads, self.width)).transpose(1, 2), at)
        kv = self._turned(self.kv_norm(self.kv(x)).unsqueeze(1), at)[:, 0]
        values, gates = self.fold(x).unflatten(-1, (2, self.series, self.entry)).unbind(2)  # (rows, T, series, …)
        entries = []
        for start in range(0, T - self.rate + 1, self.rate):
            own = range(start, start + self.rate)
            parts = [(values[:, t, -1], gates[:, t, -1] + self.place_gates[t - start, -1]) for t in own]
            if self.series == 2 and start:
                before = range(start - self.rate, start)
                parts += [(values[:, t, 0], gates[:, t, 0] + self.place_gates[t - before[0], 0]) for t in before]
            weights = torch.stack([gate for _, gate in parts]).softmax(0)
            entry = (weights * torch.stack([value for value, _ in parts])).sum(0)  # (rows, entry)
            vector = self.entry_norm(entry[:, None, None, : self.width])
            vector = self._turned(vector, at[:, start : start + 1])[:, 0, 0]
            entries.append(torch.cat([vector, entry[:, self.width :]], dim=-1))
        outputs = []
        for t in range(T):
            seen = torch.stack([kv[:, s] for s in range(max(0, t - self.window + 1), t + 1)], dim=1)
            bias = x.new_zeros(rows, seen.shape[1])
            done = entries[: (t + 1) // self.rate]
            if done:
                seen = torch.cat([seen, torch.stack(done, dim=1)[..., : self.width]], dim=1)
                bias = torch.cat([bias, self._ranked(x[:, t], done)], dim=1)
            scores = torch.einsum("rhd,rsd->rhs", q[:, :, t], seen) / math.sqrt(self.width) + bias.unsqueeze(1)
            outputs.append(torch.einsum("rhs,rsd->rhd", scores.softmax(-1), seen).unsqueeze(2))
        return self.out_proj(self._turned(torch.cat(outputs, dim=2), at, back=True).transpose(1, 2).flatten(2))

    def _ranked(self, x: Tensor, entries: list[Tensor]) -> Tensor:
        """`(rows, E)`: what one token `(rows, D)` adds to its score of each entry, in the reference."""
        if not self.top_k:
            return x.new_zeros(len(x), len(entries))
        asked = self.index(x)
        scores = x.new_zeros(len(x), len(entries))
        for h in range(self.index_heads):
            query = asked[:, h * self.index_width : (h + 1) * self.index_width]
            weight = asked[:, self.index_heads * self.index_width + h] / math.sqrt(self.index_heads)
            for e, entry in enumerate(entries):
                product = (query * entry[:, self.width :]).sum(-1) / math.sqrt(self.index_width)
                scores[:, e] += weight * torch.log1p(product.exp())
        ranks = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
        return scores.masked_fill(ranks >= self.top_k, -torch.inf)


def best(scores: Tensor, count: int) -> Tensor:
    """`scores` `(rows, T, E)`, all but the `count` highest of each token at -inf."""
    if scores.shape[-1] <= count:
        return scores
    lowest = scores.topk(count, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < lowest, -torch.inf)


def _normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
