"""A step of T tokens on the whole stack, and which of a layer's slots it sees."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from translator.attention.masks import restrict, view_mask
from translator.cache.lengths import Lengths


class KeyPositions(Protocol):
    """Where the slots of a view stand, for states that keep tokens elsewhere than at their position."""

    def __call__(self, lengths: Lengths, T: int, device: torch.device) -> Tensor:
        """Positions `(visible,)` or `(rows, visible)` of the slots' tokens, the new ones included; -1 is empty."""

    def __hash__(self) -> int:
        """Equal ones share a mask."""


class View(NamedTuple):
    """Which slots a step sees in a layer: `visible` of them, slot i at position i unless `keys` says otherwise.

    With a `window`, a query sees itself and the `window - 1` positions before it; with a `chunk`, those of its own
    chunk of so many positions. One mask is made for each distinct view of a step.
    """

    visible: int
    window: int | None = None
    keys: KeyPositions | None = None
    chunk: int = 0


class Step:
    """T tokens on the whole stack: positions, slots and masks, worked out once from the lengths.

    `start` is the slot of the first new token where all rows agree, else `slots` `(rows, T)` says for each. Masks have
    `scaled_dot_product_attention`'s polarity (True = visible). `closed` once committed or rolled back: nothing more is
    written then.
    """

    __slots__ = (
        "T",
        "__weakref__",
        "_masks",
        "_places",
        "_positions",
        "block",
        "closed",
        "device",
        "end",
        "given",
        "held",
        "lengths",
        "slots",
        "source_mask",
        "start",
    )

    def __init__(
        self,
        T: int,
        lengths: Lengths,
        device: torch.device,
        *,
        block: int = 1,
        source_mask: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        """`given` is a caller's own mask `(…, T or 1, past + T)`, which hides more; `source_mask` `(B, 1, 1, S)`."""
        self.T = T
        self.lengths = lengths
        self.device = device
        self.block = block
        self.source_mask = source_mask
        self.given = given
        self.start = lengths.uniform
        self.slots = None if lengths.uniform is not None else lengths.slots(T, device)
        self.end = lengths.longest + T
        self.closed = False
        self.held: Tensor | None = None
        """The lengths as kernels read them that work on a cache in place, `(rows,)` int32; None in plain PyTorch."""
        self._positions: Tensor | None = None
        self._masks: dict[View, tuple[Tensor | None, bool]] = {}
        self._places: dict[tuple[int, int], Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """Positions of the T tokens, `(rows, T)`, int64."""
        if self._positions is None:
            self._positions = self.lengths.positions(self.T, self.device)
        return self._positions

    def places(self, heads: int, room: int) -> Tensor:
        """Where `(rows, heads, T)` vectors go in a buffer `(rows, heads, room)`, both flat; for rows with `slots`."""
        known = self._places.get((heads, room))
        if known is None:
            assert self.slots is not None
            first = torch.arange(0, self.slots.shape[0] * heads * room, room, device=self.device)  # (rows * heads,)
            known = (first.view(-1, heads, 1) + self.slots.unsqueeze(1)).reshape(-1)
            self._places[heads, room] = known
        return known

    def mask(self, view: View) -> tuple[Tensor | None, bool]:
        """`(mask, is_causal)` of what this view shows: None, `(T, visible)` or `(rows, 1, T, visible)`."""
        known = self._masks.get(view)
        if known is None:
            known = self._masks[view] = self._made(view)
        return known

    def _made(self, view: View) -> tuple[Tensor | None, bool]:
        keys = None if view.keys is None else view.keys(self.lengths, self.T, self.device)
        past = self.lengths.uniform if self.lengths.uniform is not None else self.lengths.tensor()
        mask, is_causal = view_mask(past, self.T, view.visible, self.device, view.window, keys, view.chunk)
        if self.given is None:
            return mask, is_causal
        return restrict(self.given, mask, is_causal, self.T, keys), False
