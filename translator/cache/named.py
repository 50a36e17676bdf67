"""State of a fixed size and with names: what recurrent structures keep in place of keys and values."""

import torch
from torch import Tensor

from translator.cache.layer_step import LayerStep
from translator.cache.lengths import Lengths
from translator.cache.state import LayerState
from translator.cache.step import Step, View


class NamedState(LayerState):
    """Tensors `(rows, …)` by name, zero at first, replaced as a whole by each step.

    A step reads `current`, computes, and gives the tensors after its T tokens to `put`; they count from the commit on.
    What a row held earlier is gone, so that rows can be emptied and not shortened.
    """

    kind = "recurrent"

    def __init__(
        self,
        rows: int,
        shapes: dict[str, tuple[int, ...]],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`shapes` are those of one row."""
        with torch.inference_mode(False):
            self.current = {
                name: torch.zeros((rows, *shape), dtype=dtype, device=device) for name, shape in shapes.items()
            }
        self._next: dict[str, Tensor] | None = None

    def put(self, step: LayerStep, **tensors: Tensor) -> None:
        """What will be `current` once `step` is committed; raises `ValueError` for other names or shapes."""
        held, given = ({name: tuple(part.shape) for name, part in parts.items()} for parts in (self.current, tensors))
        if given != held:
            raise ValueError(f"state holds {held}, not {given}")
        self._next = tensors
        step.mark_written()

    def begin(self, step: Step) -> View:
        """Nothing is shown: the structure reads `current`."""
        self._next = None
        return View(0)

    def commit(self, step: Step) -> None:
        """The new tensors take the old ones' place."""
        if self._next is None:
            raise RuntimeError("a recurrent layer took part in a step without putting its new state")
        self.current, self._next = self._next, None

    def rollback(self, step: Step) -> None:
        """The new tensors are dropped."""
        self._next = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in self.current.values())

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row, neighbours first."""
        self.current = {name: part.repeat_interleave(beams, dim=0) for name, part in self.current.items()}

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`."""
        self.current = {name: part.index_select(0, rows) for name, part in self.current.items()}

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """The rows' tensors; `length` doesn't matter."""
        return {name: part[rows] for name, part in self.current.items()}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`."""
        if contents.keys() != self.current.keys():
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        changed = {name: part.clone() for name, part in self.current.items()}  # made in any mode, written in any other
        for name, part in contents.items():
            changed[name][rows] = part
        self.current = changed

    def check_clear(self, lengths: Lengths) -> None:
        """Rows can be emptied, not shortened."""
        if lengths.uniform != 0:
            raise self.cannot("crop: its rows can be emptied and not shortened")

    def clear(self, lengths: Lengths, until: int) -> None:
        """Empties every row."""
        self.check_clear(lengths)
        self.current = {name: torch.zeros_like(part) for name, part in self.current.items()}

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts every tensor."""
        self.current = {name: part.to(device, dtype) for name, part in self.current.items()}
