"""Cross-layer attention (Brandon et al. 2024): a layer that reads the keys and values of an earlier one.

It projects queries alone, and keeps nothing: of two such layers in a row of full attention, a cache holds one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from translator.attention.grouped import GroupedAttention
from translator.attention.kernels import merge_heads, split_heads
from translator.attention.multihead import CachedMultiheadAttention
from translator.attention.structure import AttentionStep, Product, Products, StateSpec, Structure
from translator.attention.written_out import by_token, turned_plainly
from translator.errors import UserError


class SharedAttention(Structure):
    """Reads K and V of the nearest earlier layer that has its own, and sees what that one sees.

    Its queries are turned to their positions as that layer's keys are. `connect` finds the layer.
    """

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
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a positive multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.q = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._earlier: tuple[Structure, ...] = ()
        self.owner = -1

    def connect(self, earlier: Sequence[Structure]) -> None:
        """Finds the layer to read; raises `UserError` where there is none, or the nearest keeps something else."""
        for index in range(len(earlier) - 1, -1, -1):
            if earlier[index].shareable is None:
                continue
            if not earlier[index].shareable:
                name = type(earlier[index]).__name__
                raise UserError(
                    f"decoder layer {len(earlier)} can't share what layer {index} keeps: {name} has no keys and values "
                    "that another could read"
                )
            self.owner, self._earlier = index, (earlier[index],)  # in a tuple: a module's modules are its own
            return
        raise UserError(f"decoder layer {len(earlier)} has no earlier layer whose keys and values it could share")

    @property
    def origin(self) -> Structure:
        """The structure of the layer that is read."""
        if not self._earlier:
            raise RuntimeError("a layer that shares keys and values stands in a stack: CachedDecoder connects it")
        return self._earlier[0]

    def products(self) -> dict[str, Product]:
        """`q` and `out_proj`."""
        return {name: (module.weight, module.bias) for name, module in (("q", self.q), ("out_proj", self.out_proj))}

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """A state that holds nothing and reads that of the layer `owner`."""
        return spec.shared_state(self.owner)

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
        q = split_heads(ops.product("q", x, norm=norm), self.num_heads)
        origin, kernel = self.origin, ops.attention
        if isinstance(origin, GroupedAttention):
            q, kernel = origin.turned(q, step), origin.banded(kernel, step)
        attended = step.attend_again(q, kernel, self.dropout if self.training else 0.0)
        return ops.product("out_proj", merge_heads(attended), dropout=dropout, residual=residual)

    def reference_among(self, inputs: Sequence[Tensor]) -> Tensor:
        """Token by token, over the keys and values that the layer read makes of its own input."""
        origin = self.origin
        assert isinstance(origin, CachedMultiheadAttention)
        _, k, v = origin.projected_plainly(inputs[self.owner])
        q = turned_plainly(self.q(inputs[-1]).unflatten(-1, (self.num_heads, -1)), origin.base)
        return self.out_proj(by_token(q, k, v, origin.band))
