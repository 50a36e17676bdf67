"""A step that runs again and again without Python: everything that changes from token to token is on the device."""

import torch
from torch import Tensor

from translator.attention.masks import view_mask
from translator.cache.layer_step import StackStep
from translator.cache.lengths import Lengths
from translator.cache.state import UnsupportedCacheOperation
from translator.cache.step import View


class FixedStep(StackStep):
    """One token for each row at `positions`, a tensor on the device that its owner changes between runs.

    Slots and masks are worked out from it on the device, so that no shape and no Python number depends on how much a
    row holds: `visible` slots are shown, whatever their row's length, and the rest of them is zero and masked. What
    these operations recorded once can be run again for every token whose position is below `visible`.
    """

    __slots__ = ("dtype",)

    def __init__(
        self, positions: Tensor, visible: int, dtype: torch.dtype, block: int, source_mask: Tensor | None
    ) -> None:
        """`positions` `(rows, 1)`, int64; `dtype` what K and V are kept in; `source_mask` broadcasts to `(B, 1, 1, S)`,
        in that type, to be added."""
        super().__init__(1, Lengths(len(positions)), positions.device, block=block, source_mask=source_mask)
        self.start = None
        self.slots = self._positions = positions
        self.end = visible
        self.dtype = dtype

    def _made(self, view: View) -> tuple[Tensor | None, bool]:
        """As numbers to add, made once a step: each attention call would make them from a bool mask again."""
        if view.keys is not None:
            raise UnsupportedCacheOperation("a state that keeps tokens elsewhere than at their position has a host's")
        assert self.slots is not None
        seen, _ = view_mask(self.slots[:, 0], 1, view.visible, self.device, view.window, chunk=view.chunk)
        assert seen is not None
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, float("-inf")), False
