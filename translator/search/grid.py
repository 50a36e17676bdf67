"""What a search keeps of the sentences it is decoding: a grid of B sentences by K rows, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.search.base import NEVER, Hypothesis, Sentence


@dataclass(slots=True, eq=False)
class Member:
    """A sentence in the grid, under the number its caller knows it by."""

    number: int
    sentence: Sentence
    config: DecodeConfig
    found: list[Hypothesis] = field(default_factory=list)
    gone: bool = False
    """Done or cancelled: leaves before the next step."""

    @property
    def key(self) -> tuple[int, ...]:
        """What its samples are drawn by."""
        return (self.number,) if self.sentence.key is None else self.sentence.key


class Grid:
    """Sentences have lengths of their own: each counts from its own first token.

    `lengths` `(B,)` tokens decoded; `history` `(B, K, room)` them; `totals` `(B, K)` log-probabilities in fp64, since a
    long target's rounding would show in its score; `live` `(B, K)` rows that go on; `tokens` `(B, K)` what the next
    step appends; `parents` `(B, K)` the rows these go on from.
    """

    def __init__(self, members: Sequence[Member], rows: int, *, alike: bool) -> None:
        """Nothing decoded yet. `alike`: rows that would all do the same, of which only the first may be continued."""
        B = len(members)
        self.members = list(members)
        self.lengths = torch.zeros(B, dtype=torch.int64)
        self.history = torch.zeros(B, rows, 32, dtype=torch.int64)
        self.totals = torch.zeros(B, rows, dtype=torch.float64)
        self.live = torch.ones(B, rows, dtype=torch.bool)
        if alike:
            self.live[:, 1:] = False
            self.totals[:, 1:] = NEVER
        starts = torch.tensor([member.sentence.start_id for member in members])
        self.tokens = starts.unsqueeze(1).expand(B, rows).clone()
        self.parents = torch.arange(rows).expand(B, rows).clone()
        self._settle()

    @property
    def shape(self) -> tuple[int, int]:
        """(B, K)."""
        return len(self.members), self.live.shape[1]

    def grow(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Row `(b, k)` becomes the old row `parents[b, k]` and `tokens[b, k]` after it; both `(B, K)`."""
        B, K = self.shape
        longest = int(self.lengths.max())
        if longest == self.history.shape[2]:
            self.history = torch.cat([self.history, torch.zeros_like(self.history)], dim=2)
        if parents is not None:
            held = self.history[:, :, :longest]  # (B, K, t)
            held.copy_(held.gather(1, parents.unsqueeze(2).expand(B, K, longest)))
            self.parents = parents
        self.history[torch.arange(B).unsqueeze(1), torch.arange(K), self.lengths.unsqueeze(1)] = tokens
        self.tokens = tokens
        self.lengths = self.lengths + 1

    def held(self, slot: int, row: int) -> list[int]:
        """The tokens of one row."""
        tokens: list[int] = self.history[slot, row, : int(self.lengths[slot])].tolist()
        return tokens

    def changed(self, order: Sequence[int], newcomers: "Grid | None" = None) -> None:
        """Slot i becomes the old slot `order[i]`; numbers from B on are the sentences of `newcomers`."""
        picked = torch.tensor(order, dtype=torch.int64)
        for name in ("history", "lengths", "totals", "live", "tokens", "parents"):
            parts = [getattr(self, name)]
            if newcomers is not None:
                parts.append(getattr(newcomers, name))
            if name == "history":
                room = max(part.shape[2] for part in parts)
                parts = [torch.nn.functional.pad(part, (0, room - part.shape[2])) for part in parts]
            setattr(self, name, torch.cat(parts)[picked])
        members = self.members + ([] if newcomers is None else newcomers.members)
        self.members = [members[slot] for slot in order]
        self._settle()

    def _settle(self) -> None:
        """What hangs on the members alone."""
        sentences = [member.sentence for member in self.members]
        self.end_ids = torch.tensor([sentence.end_id for sentence in sentences])
        self.limits = torch.tensor([sentence.limit for sentence in sentences])
