"""`Driver`: steps a decoding, applies the rules, lets sentences that are done leave and waiting ones enter."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.engine.base import Decoding, Engine
from translator.padding import pad, padding
from translator.search.base import NEVER, Hypothesis, Sentence, check_finite, normalised, ranked
from translator.search.grid import Grid, Member
from translator.search.policy import Choice, policy_of
from translator.search.rules import banned_ids, forced_ids

Start = Callable[[Sequence[Sequence[int]], int | None], Decoding]
"""(ids of each source, slots of the grid if more than these) → a decoding of them, nothing decoded yet."""


def starter(engine: Engine, spec: CacheSpec) -> Start:
    """How a `Driver` starts sentences on `engine`, its state as `spec` says."""

    def start(sources: Sequence[Sequence[int]], slots: int | None = None) -> Decoding:
        ids = pad(sources, 0).to(engine.device)
        hidden = padding([len(source) for source in sources]).to(engine.device)
        return engine.start(engine.encode(ids, hidden), hidden, replace(spec, sentences=slots))

    return start


class Grown(NamedTuple):
    """A row's new token, and the row of its sentence that it goes on from."""

    parent: int
    token: int


@dataclass(slots=True)
class Event:
    """What one step brought one sentence.

    `rows`: how each of its rows grew; None for one that the end token completed, or that was given up. `ended`: the
    hypotheses that ended with this step. `result`: the best of all it found, best first, once it is done.
    """

    number: int
    rows: list[Grown | None]
    ended: list[Hypothesis] = field(default_factory=list)
    result: list[Hypothesis] | None = None


class Driver:
    """Decodes sentences that come and go, each to what it would be alone.

    >>> driver = Driver(config, starter(EagerEngine(model), CacheSpec(beams=rows_per_sentence(config))), room=64)
    >>> number = driver.add(Sentence(max_length=50, start_id=2, end_id=3), source_ids)
    >>> while driver.busy:
    ...     for event in driver.step(): ...

    `room` bounds the sentences decoded at once; the others wait, first come, first served. Not for several threads.
    """

    def __init__(self, config: DecodeConfig, start: Start | None = None, *, room: int | None = None) -> None:
        """Raises `UserError` when `config` names an unknown search. Without `start`, only `adopt` brings sentences."""
        self.config = config
        self.policy = policy_of(config)()
        self.rows = self.policy.rows(config)
        self.room = room
        self._start = start
        self._numbers = 0
        self._waiting: deque[tuple[Member, Sequence[int]]] = deque()
        self._grid: Grid | None = None
        self._decoding: Decoding | None = None

    @property
    def busy(self) -> bool:
        """Whether a sentence is being decoded or waits."""
        running = () if self._grid is None else self._grid.members
        return bool(self._waiting) or any(not member.gone for member in running)

    def add(self, sentence: Sentence, source: Sequence[int]) -> int:
        """Lets a sentence of source ids in as soon as there is room; returns its number in events.

        Raises `ValueError` for settings that ask for another search or number of rows than the driver's.
        """
        if self._start is None:
            raise ValueError("this driver can't start sentences; give it a starter, or adopt a decoding")
        member = self._member(sentence)
        self._waiting.append((member, source))
        return member.number

    def adopt(self, decoding: Decoding, sentences: Sequence[Sentence]) -> list[int]:
        """Takes over a decoding of `sentences` just started; their numbers. Only while nothing else is decoded."""
        if self.busy:
            raise ValueError("adopt: other sentences are being decoded")
        if (decoding.batch_size, decoding.beams) != (len(sentences), self.rows):
            raise ValueError(
                f"{len(sentences)} sentences of {self.rows} rows need a decoding of as many, not "
                f"{decoding.batch_size} of {decoding.beams}"
            )
        members = [self._member(sentence) for sentence in sentences]
        self._decoding, self._grid = decoding, self._new_grid(members)
        return [member.number for member in members]

    def cancel(self, number: int) -> None:
        """Forgets a sentence, waiting or running: no more events come of it. One that is done stays done."""
        self._waiting = deque(entry for entry in self._waiting if entry[0].number != number)
        for member in () if self._grid is None else self._grid.members:
            if member.number == number:
                member.gone = True

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One token for every sentence in the grid, and what came of it; nothing when idle.

        Raises `UserError` when the model gives something else than numbers.
        """
        self._change_members()
        grid, decoding = self._grid, self._decoding
        if grid is None or decoding is None:
            return []
        scores = decoding.step(grid.tokens.flatten())
        check_finite(scores.log_z)  # one NaN or infinity in a row of logits shows in the sum over it
        device = scores.log_z.device
        choice = self.policy.choose(scores, grid, banned_ids(grid, device), forced_ids(grid, device))
        return self._follow(grid, choice)

    def run(self) -> dict[int, list[Hypothesis]]:
        """Steps until nothing is left; each sentence's hypotheses by its number, best first."""
        results = {}
        while self.busy:
            results.update({event.number: event.result for event in self.step() if event.result is not None})
        return results

    # -- one step ----------------------------------------------------------------------------------------------------

    def _follow(self, grid: Grid, choice: Choice) -> list[Event]:
        """Writes the choice into the grid and says what ended."""
        K = grid.shape[1]
        events = [Event(member.number, [None] * K) for member in grid.members]
        for slot, row, log_prob in choice.ended:
            tokens = [*grid.held(slot, row), grid.members[slot].sentence.end_id]
            self._keep(grid.members[slot], events[slot], tokens, log_prob, finished=True)
        grid.grow(choice.tokens, choice.parents)
        grid.totals, grid.live = choice.totals, choice.live
        tokens, parents = choice.tokens.tolist(), grid.parents.tolist()
        for slot, row in grid.live.nonzero().tolist():
            events[slot].rows[row] = Grown(parents[slot][row], tokens[slot][row])
        self._cut_at_limits(grid, events)
        best = grid.totals.masked_fill(~grid.live, NEVER).amax(dim=1).tolist()
        for slot, (member, event) in enumerate(zip(grid.members, events, strict=True)):
            live = bool(grid.live[slot].any())
            if live and not self.policy.is_done(member, best[slot]):
                continue
            if not member.found:  # every continuation was impossible: still one target a sentence
                self._keep(member, event, grid.held(slot, 0), float(grid.totals[slot, 0]), finished=False)
            member.gone = True
            event.result = ranked(member.found)[: member.config.n_best]
        return events

    def _cut_at_limits(self, grid: Grid, events: list[Event]) -> None:
        """Keeps live rows of sentences at their longest, unfinished as they are."""
        for slot in (grid.lengths >= grid.limits).nonzero().flatten().tolist():
            member = grid.members[slot]
            for row in grid.live[slot].nonzero().flatten().tolist():
                log_prob = float(grid.totals[slot, row])
                self._keep(member, events[slot], grid.held(slot, row), log_prob, finished=False)
            grid.live[slot] = False

    @staticmethod
    def _keep(member: Member, event: Event, tokens: list[int], log_prob: float, *, finished: bool) -> None:
        score = normalised(log_prob, len(tokens), member.config.length_penalty)
        hypothesis = Hypothesis(tokens, log_prob, score, finished)
        member.found.append(hypothesis)
        event.ended.append(hypothesis)

    # -- who is in the grid --------------------------------------------------------------------------------------------

    def _change_members(self) -> None:
        """Before a step: those that are done leave, waiting ones enter, rows move to where they go on."""
        running = [] if self._grid is None else [i for i, member in enumerate(self._grid.members) if not member.gone]
        newcomers = self._newcomers(len(running))
        if not running:
            self._grid = self._decoding = None
            if newcomers:
                self._decoding = self._started(newcomers, None)
                self._grid = self._new_grid([member for member, _ in newcomers])
            return
        assert self._grid is not None and self._decoding is not None
        B, K = self._grid.shape
        n, free = len(newcomers), [slot for slot in range(B) if slot not in set(running)]
        if n > len(free):
            self._rebuild(running, newcomers)
        else:
            order = list(range(B))
            if newcomers:
                self._decoding.admit(free[:n], self._started(newcomers, None))
                for index, slot in enumerate(free[:n]):
                    order[slot] = B + index
            keep = [slot for slot in range(B) if slot not in free[n:]]
            if len(keep) < B:
                self._decoding.compact(torch.tensor(keep))
            if newcomers or len(keep) < B:
                entering = self._new_grid([member for member, _ in newcomers]) if newcomers else None
                self._grid.changed([order[slot] for slot in keep], entering)
        parents, stay = self._grid.parents, torch.arange(K).expand(len(self._grid.members), K)
        if not torch.equal(parents, stay):
            self._decoding.reorder(parents)
            self._grid.parents = stay

    def _rebuild(self, running: list[int], newcomers: list[tuple[Member, Sequence[int]]]) -> None:
        """A larger grid: the newcomers' own, with slots for those that are running."""
        assert self._grid is not None and self._decoding is not None
        n, B = len(newcomers), len(self._grid.members)
        larger = self._started(newcomers, n + len(running))
        if len(running) < B:
            self._decoding.compact(torch.tensor(running))
        larger.admit(range(n, n + len(running)), self._decoding)
        entering = self._new_grid([member for member, _ in newcomers])
        self._grid.changed([*range(B, B + n), *running], entering)
        self._decoding = larger

    def _newcomers(self, running: int) -> list[tuple[Member, Sequence[int]]]:
        count = len(self._waiting) if self.room is None else min(len(self._waiting), self.room - running)
        return [self._waiting.popleft() for _ in range(count)]

    def _started(self, newcomers: list[tuple[Member, Sequence[int]]], slots: int | None) -> Decoding:
        assert self._start is not None
        try:
            return self._start([source for _, source in newcomers], slots)
        except BaseException:
            self._waiting.extendleft(reversed(newcomers))  # none is lost: a caller may cancel one and go on
            raise

    def _new_grid(self, members: list[Member]) -> Grid:
        return Grid(members, self.rows, alike=self.policy.alike)

    def _member(self, sentence: Sentence) -> Member:
        config = sentence.config or self.config
        if policy_of(config) is not type(self.policy) or self.policy.rows(config) != self.rows:
            raise ValueError(
                f"a sentence of a {config.search_name} search with other rows than the driver's {self.rows}"
            )
        self._numbers += 1
        return Member(self._numbers - 1, sentence, config)


def search(decoding: Decoding, sentences: Sequence[Sentence], config: DecodeConfig) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence of a decoding just started, best first, by the search that `config` asks for."""
    driver = Driver(config)
    numbers = driver.adopt(decoding, sentences)
    results = driver.run()
    return [results[number] for number in numbers]
