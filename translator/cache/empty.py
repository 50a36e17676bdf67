"""States that hold nothing: of a layer without self-attention, and of one that reads what another layer keeps."""

from typing import Self

import torch
from torch import Tensor

from translator.cache.lengths import Lengths
from translator.cache.state import LayerState
from translator.cache.step import Step, View


class EmptyState(LayerState):
    """Nothing is kept, so that everything that happens to a grid is done at once."""

    kind = "none"
    needs_write = False

    def begin(self, step: Step) -> View:
        """Nothing is shown."""
        return View(0)

    def rollback(self, step: Step) -> None:
        """Nothing to undo."""

    @property
    def nbytes(self) -> int:
        """0."""
        return 0

    def expand(self, beams: int, length: int) -> None:
        """Nothing to repeat."""

    def select(self, rows: Tensor, length: int) -> None:
        """Nothing to move."""

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """Nothing to write; raises `UnsupportedCacheOperation` for contents."""
        if contents:
            raise self.cannot(f"admit a state of {', '.join(contents)}")

    def admit(self, rows: slice, source: LayerState, theirs: slice, length: int) -> None:
        """Nothing to take over."""
        self.write(rows, source.read(theirs, length), length)

    def clear(self, lengths: Lengths, until: int) -> None:
        """Nothing to forget."""

    def prefix(self, rows: int) -> Self:
        """Itself."""
        return self

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Nothing to move."""


class SharedState(EmptyState):
    """What is read is what the layer with the number `owner` keeps."""

    kind = "shared"

    def __init__(self, owner: int) -> None:
        self.owner = owner
