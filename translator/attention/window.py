"""Attention to the last tokens alone: a window that slides (Beltagy et al. 2020, Longformer), or chunks side by side.

What a layer keeps doesn't grow: `window - 1` tokens, however long the target is. What lies further back still comes
through, layer by layer, and through layers of another kind in the same stack.
"""

from typing import Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from translator.attention.band import Band
from translator.attention.grouped import GroupedAttention, GroupedOptions
from translator.attention.structure import StateSpec
from translator.config import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class WindowOptions(GroupedOptions):
    """`window` W in tokens, the query's own included; see `GroupedOptions` for the rest."""

    window: int = Field(default=64, ge=1, le=1 << 20)


class WindowAttention(GroupedAttention):
    """A query sees itself and the `window - 1` tokens before it."""

    options: ClassVar[type] = WindowOptions
    chunked: ClassVar[bool] = False

    def __init__(self, *arguments: Any, options: WindowOptions | None = None, **named: Any) -> None:
        chosen = options or self.options()
        super().__init__(*arguments, options=chosen, **named)
        self.band: Band = Band(chosen.window, self.chunked)

    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """K and V of the last `window - 1` tokens, `(rows, H_kv, window - 1, D_head)`, in whatever `spec.kind`."""
        weight = self.in_proj_weight
        return spec.window_state(
            rows, self.kv_heads, self.width, band=self.band, dtype=weight.dtype, device=weight.device
        )


class ChunkedAttention(WindowAttention):
    """A query sees the tokens of its own chunk of `window` up to itself: the first of a chunk sees itself alone."""

    options: ClassVar[type] = WindowOptions
    chunked = True
