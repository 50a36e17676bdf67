"""K and V of the last tokens alone: what a layer keeps whose attention doesn't reach further back."""

from typing import NamedTuple

import torch
from torch import Tensor

from translator.attention.band import Band
from translator.attention.kernels import Kernel
from translator.cache.dense import normal_tensors
from translator.cache.lengths import Lengths
from translator.cache.state import KeyValueState, WritingStep
from translator.cache.step import Step, View


class LastPositions(NamedTuple):
    """`KeyPositions` of `held` slots that end with the token before the step, whatever the row's length."""

    held: int

    def __call__(self, lengths: Lengths, T: int, device: torch.device) -> Tensor:
        """`(held + T,)`, or `(rows, held + T)` of rows of unequal length."""
        places = torch.arange(-self.held, T, device=device)
        if lengths.uniform is not None:
            return (places + lengths.uniform).clamp(min=-1)
        return (lengths.tensor().to(device).unsqueeze(1) + places).clamp(min=-1)


class WindowState(KeyValueState):
    """K and V `(rows, H_kv, size - 1, D_head)` of the tokens before the next one that it can still see.

    The newest stand at the end in every row, whatever its length, so that a step is one concatenation and a cut; slots
    before a row's first token are zero. What has left is gone: rows that lost a token can be emptied and not shortened.
    """

    kind = "window"

    def __init__(
        self, rows: int, heads: int, width: int, *, band: Band, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.band = band
        with normal_tensors():
            self.k = torch.zeros(rows, heads, band.size - 1, width, dtype=dtype, device=device)
            self.v = torch.zeros_like(self.k)
        self.lengths = Lengths(rows)
        self._next: tuple[Tensor, Tensor] | None = None

    @property
    def held(self) -> int:
        """Slots of a row."""
        return self.band.size - 1

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.k.nbytes + self.v.nbytes

    def begin(self, step: Step) -> View:
        """All slots and the step's own tokens."""
        self._next = None
        band = self.band
        return View(
            self.held + step.T, None if band.chunked else band.size, LastPositions(self.held), band.size * band.chunked
        )

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Puts `k, v` `(rows, H_kv, T, D_head)` behind what is held, to be kept once the step is committed."""
        rows, heads, _, width = self.k.shape
        if k.shape != (rows, heads, step.T, width) or v.shape != k.shape:  # a single row would broadcast
            raise ValueError(f"K or V {tuple(k.shape)} for a step of {step.T} tokens on {rows} rows")
        self._next = torch.cat([self.k, k.to(self.k.dtype)], dim=2), torch.cat([self.v, v.to(self.v.dtype)], dim=2)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, size - 1 + T, D_head)`."""
        assert self._next is not None
        return self._next

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: WritingStep, kernel: Kernel, dropout: float) -> Tensor:
        """Without a mask where one token of equally long rows attends: it is shown what it sees and nothing else."""
        k, v = step.update(k, v)
        whole = step.step
        if whole.T == 1 and whole.start is not None and whole.given is None:
            seen = whole.start - max(0, self.band.first(whole.start)) + 1
            return kernel(q, k[:, :, -seen:], v[:, :, -seen:], None, False, dropout)
        return kernel(q, k, v, step.mask, step.is_causal, dropout)

    def commit(self, step: Step) -> None:
        """The last tokens are held now."""
        assert self._next is not None  # the cache has seen that every layer was updated
        with normal_tensors():
            self.k, self.v = (part[:, :, part.shape[2] - self.held :].clone() for part in self._next)
        self._next = None
        self.lengths = step.lengths.advanced(step.T)

    def rollback(self, step: Step) -> None:
        """What the step brought is dropped."""
        self._next = None

    def expand(self, beams: int, length: int) -> None:
        """Repeats every row `beams` times, neighbours first."""
        self._rows(torch.arange(len(self.k), device=self.k.device).repeat_interleave(beams))

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`."""
        self._rows(rows)

    def _rows(self, rows: Tensor) -> None:
        with normal_tensors():
            self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)
        if self.lengths.ragged is None:
            self.lengths = Lengths(len(rows), self.lengths.uniform)
        else:
            self.lengths = Lengths.of(self.lengths.ragged[rows.cpu()])

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """`k` and `v` as they are held, and `lengths` `(rows,)`."""
        return {"k": self.k[rows], "v": self.v[rows], "lengths": self.lengths.tensor()[rows]}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`; raises `UnsupportedCacheOperation` for what another kind of state held."""
        if contents.keys() != {"k", "v", "lengths"} or contents["k"].shape[1:] != self.k.shape[1:]:
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        with normal_tensors():
            self.k, self.v = self.k.clone(), self.v.clone()
            self.k[rows], self.v[rows] = contents["k"], contents["v"]
        lengths = self.lengths.tensor().clone()
        lengths[rows] = contents["lengths"]
        self.lengths = Lengths.of(lengths)

    def check_clear(self, lengths: Lengths) -> None:
        """Rows can be emptied, and shortened while all their tokens are still there."""
        before, after = self.lengths.tensor(), lengths.tensor()
        if bool(((after > 0) & (after < before) & (before > self.held)).any()):
            raise self.cannot(f"crop: of a row only the last {self.held} tokens are held; it can be emptied")

    def clear(self, lengths: Lengths, until: int) -> None:
        """Forgets each row's tokens from its length on."""
        self.check_clear(lengths)
        gone = (self.lengths.tensor() - lengths.tensor()).clamp(0, self.held)
        places = torch.arange(self.held) - gone.unsqueeze(1)  # (rows, held): where each slot's token stands now
        there = (places >= 0).to(self.k.device)[:, None, :, None]
        places = places.clamp(min=0).to(self.k.device)[:, None, :, None]
        with normal_tensors():
            self.k, self.v = (
                torch.where(there, part.gather(2, places.expand_as(part)), 0) for part in (self.k, self.v)
            )
        self.lengths = lengths

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts both."""
        with normal_tensors():
            self.k, self.v = self.k.to(device, dtype), self.v.to(device, dtype)
