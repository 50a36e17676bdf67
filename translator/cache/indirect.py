"""The container in which hypotheses are entries of a table, and keys and values never move."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor

from translator.cache.dense import normal_tensors, placed, taken
from translator.cache.dynamic import GrowingCache
from translator.cache.lengths import Lengths
from translator.cache.spec import CacheSpec, register
from translator.cache.step import Step, View

TABLE = "ancestry"


class Ancestry:
    """In which buffer row each slot of each hypothesis lies; one table for the layers of a stack.

    `origin` `(rows, slots)` and `home` `(rows,)`, int32: slot s of row r lies in buffer row `origin[r, s]`, and what r
    writes next goes to buffer row `home[r]`. The homes of a sentence's rows are its own: no other sentence refers to
    them. Within a sentence slots are shared, which is safe while its rows are equally long: none then writes where
    another reads.

    Each layer's state counts the changes it was told of (`turn`), and the first to hear of one makes it.
    """

    def __init__(self, rows: int, slots: int, beams: int, device: torch.device | None) -> None:
        self.beams = beams
        with normal_tensors():
            self.home = torch.arange(rows, dtype=torch.int32, device=device)
            self.origin = torch.zeros(rows, slots, dtype=torch.int32, device=device)
        self.shares = False
        self.turn = 0
        self._begun: weakref.ref[Step] | None = None
        self._settled: Ancestry | None = None

    @property
    def rows(self) -> int:
        """Rows of the grid."""
        return len(self.home)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.origin.untyped_storage().nbytes() + self.home.untyped_storage().nbytes()

    def begin(self, step: Step, slots: int) -> None:
        """The slots of the step are where each row writes; `slots` are there in all."""
        if self._begun is not None and self._begun() is step:
            return
        self._begun = weakref.ref(step)
        self.widen(slots)
        if step.start is not None:
            self.origin[: self.rows, step.start : step.end] = self.home.unsqueeze(1)
        else:
            assert step.slots is not None
            self.origin[: self.rows].scatter_(1, step.slots, self.home.unsqueeze(1).expand_as(step.slots))

    def widen(self, slots: int) -> None:
        """Room for `slots` in every row."""
        if slots > self.origin.shape[1]:
            with normal_tensors():
                wider = self.origin.new_zeros(len(self.origin), slots)
            wider[:, : self.origin.shape[1]] = self.origin
            self.origin = wider

    def may_clash(self, lengths: Lengths) -> bool:
        """Whether a row may write where another of its sentence still reads."""
        if not self.shares or lengths.ragged is None:
            return False
        by_sentence = lengths.ragged.view(-1, self.beams)
        return bool((by_sentence != by_sentence[:, :1]).any())

    def settled(self) -> Ancestry:
        """A table for rows that keep everything at home; the same one for all who ask."""
        if self._settled is None:
            self._settled = Ancestry(self.rows, self.origin.shape[1], self.beams, self.home.device)
            self._settled.home = self.home
            self._settled.origin[: self.rows] = self.home.unsqueeze(1)
        return self._settled

    def select(self, rows: Tensor, length: int, turn: int) -> None:
        """Row i goes on from the old row `rows[i]`; whole sentences, or rows within each of them."""
        if turn <= self.turn:
            return
        self.turn, self._settled = turn, None
        # In place: addresses stay, and so do the homes of a sentence whose rows only change among themselves.
        held = self.origin[:, :length]
        held[: len(rows)] = held.index_select(0, rows)
        if self.beams > 1:
            self.shares = True
        within = rows.device.type == "cpu" and len(rows) == self.rows and rows.tolist()
        if within and all(row // self.beams == place // self.beams for place, row in enumerate(within)):
            return  # rows of the same sentences, whose homes stay
        sentences = rows.view(-1, self.beams)[:, :1] // self.beams
        homes = (sentences * self.beams + torch.arange(self.beams, device=rows.device)).view(-1)
        self.home = placed(self.home, self.home.index_select(0, homes))

    def expand(self, beams: int, turn: int) -> None:
        """Every row becomes `beams` rows, neighbours first, that share what it holds."""
        if turn <= self.turn:
            return
        self.turn, self._settled = turn, None
        self.beams = beams
        with normal_tensors():
            # A row's buffer row and its new neighbours, wherever it was: sentences may have left or changed places.
            first = self.home.unsqueeze(1) * beams
            self.home = (first + torch.arange(beams, dtype=torch.int32, device=first.device)).view(-1)
            self.origin = (self.origin[: len(first)] * beams).repeat_interleave(beams, dim=0)
        self.shares = beams > 1

    def to(self, device: torch.device | str | None) -> None:
        """Moves the table."""
        with normal_tensors():
            self.home, self.origin = self.home.to(device), self.origin.to(device)


@register
class IndirectCache(GrowingCache):
    """Beams by reference: `reorder` and `compact` change a table; keys and values stay where they were put.

    `reorder` costs the same however much is held, and nothing where no beam of a sentence changes its parent. In plain
    PyTorch a step gathers what it shows; a kernel that follows the table reads it in place (`attend`).
    """

    kind = "indirect"
    kernels_may_read = True
    by_reference = True

    def __init__(self, spec: CacheSpec, rows: int, heads: int, width: int, **factory: Any) -> None:
        super().__init__(spec, rows, heads, width, **factory)
        shared: dict[str, Any] = getattr(spec, "shared", {})
        self.owns_table = TABLE not in shared
        if self.owns_table:
            shared[TABLE] = Ancestry(rows, self.slots, spec.beams, self.k.device)
        self.table: Ancestry = shared[TABLE]
        self.turn = 0
        self._lengths, self._T = Lengths(rows), 0

    @classmethod
    def account_shared(cls, spec: CacheSpec, rows: int, length: int) -> int:
        """See `KeyValueState.account_shared`: the table, a row and a home for each hypothesis."""
        return rows * (cls.slots_for(spec, length) + 1) * torch.int32.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not; the first layer counts the table."""
        return super().nbytes + (self.table.nbytes if self.owns_table else 0)

    def begin(self, step: Step) -> View:
        """Room for the step; rows that may clash are parted first."""
        visible = self._reserve(step.end, step.block)
        self.clean = max(self.clean, step.end)  # what growing has to keep
        if self.table.may_clash(step.lengths):
            self._settle(step.lengths)
        self.table.begin(step, self.slots)
        self._lengths, self._T = step.lengths, step.T
        return View(visible)

    def in_place(self, step: Step, view: View) -> list[Tensor] | None:
        """See `KeyValueState.in_place`: `k`, `v` and the table."""
        if view[1:] != View(0)[1:] or step.given is not None:
            return None
        return [self.k, self.v, self.table.origin, self.table.home]

    def again(self, lengths: Lengths) -> None:
        """See `KeyValueState.again`; the kernel fills in the table."""
        self.clean = max(self.clean, lengths.longest + 1)

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` into the slots of `step`, each row at its home."""
        home = self.table.home.long().unsqueeze(1)  # (rows, 1)
        slots = torch.arange(step.start or 0, step.end, device=home.device) if step.slots is None else step.slots
        for buffer, new in ((self.k, k), (self.v, v)):
            if new.shape != (len(home), buffer.shape[1], step.T, buffer.shape[3]):  # one row or token would broadcast
                raise ValueError(f"K or V {tuple(new.shape)} for a step of {step.T} tokens on {len(home)} rows")
            buffer.transpose(1, 2)[home, slots] = new.transpose(1, 2).to(buffer.dtype)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`, gathered; slots beyond a row's length are zero."""
        return self._gathered(self._lengths.advanced(self._T), view.visible)

    def expand(self, beams: int, length: int) -> None:
        """Gives each row's buffer row `beams - 1` neighbours, in which its hypotheses go on."""
        for name, old in (("k", self.k), ("v", self.v)):
            with normal_tensors():
                roomy = old.new_empty(old.shape[0] * beams, *old.shape[1:])
            roomy[::beams, :, :length] = old[:, :, :length]
            setattr(self, name, roomy)
        self.clean = length
        self.turn += 1
        self.table.expand(beams, self.turn)

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`: in the table."""
        self.turn += 1
        self.table.select(rows, length, self.turn)

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """`k` and `v` `(rows, H_kv, length, D_head)`, gathered; beyond a row's own length they may be anything."""
        origin = self.table.origin[: self.table.rows, :length][rows].long()
        return {"k": taken(self.k, origin), "v": taken(self.v, origin)}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        """These rows become `contents`, each at its home."""
        if contents.keys() != {"k", "v"}:
            raise self.cannot(f"admit a state of {', '.join(contents)}")
        self._reserve(length)
        self.clean = max(self.clean, length)
        home = self.table.home[rows].long()
        for buffer, new in ((self.k, contents["k"]), (self.v, contents["v"])):
            buffer[home, :, :length] = new.to(buffer.dtype)
        self.table.widen(self.slots)
        self.table.origin[: self.table.rows, :length][rows] = self.table.home[rows].unsqueeze(1)

    def rollback(self, step: Step) -> None:
        """Nothing to undo: what the step wrote is beyond every row's length, where nothing is read."""

    def clear(self, lengths: Lengths, until: int) -> None:
        """Forgets tokens from each row's length on: the lengths say so, and `begin` looks to what is shared."""

    def prefix(self, rows: int) -> Self:
        """Refused: what a row holds isn't in its own memory."""
        raise self.cannot("keep its addresses, which a captured step needs")

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves or converts both buffers, and the table."""
        super().to(device, dtype)
        self.table.to(device)

    def _gathered(self, lengths: Lengths, visible: int) -> tuple[Tensor, Tensor]:
        origin = self.table.origin[: self.table.rows, :visible].long()
        k, v = taken(self.k, origin), taken(self.v, origin)
        if lengths.uniform is None or lengths.uniform < visible:
            beyond = torch.arange(visible) >= lengths.tensor().unsqueeze(1)
            for part in (k, v):
                part.masked_fill_(beyond.to(part.device)[:, None, :, None], 0)
        return k, v

    def _settle(self, lengths: Lengths) -> None:
        k, v = self._gathered(lengths, lengths.longest)
        home = self.table.home.long()
        for buffer, own in ((self.k, k), (self.v, v)):
            buffer[home, :, : lengths.longest] = own
        self.table = self.table.settled()
