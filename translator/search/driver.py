"""`Driver`: steps a decoding, applies the rules, lets sentences that are done leave and waiting ones enter."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

import torch

from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.engine.base import Decoding, Engine
from translator.padding import pad, padding
from translator.search.base import Hypothesis, Sentence, check_finite, normalised, ranked
from translator.search.grid import Grid, Member
from translator.search.policy import Choice, policy_of
from translator.search.rules import banned_ids, forced_ids

Start = Callable[[Sequence[Sequence[int]], int | None], Decoding]
"""(ids of each source, slots of the grid if more than these) → a decoding of them, nothing decoded yet."""


def starter(engine: Engine, spec: CacheSpec) -> Start:
    """How a `Driver` starts sentences on `engine`, its state as `spec` says; all that it starts use one pool."""
    spec = spec.pooled()

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

    `tokens`, `parents` and `live` are its rows of the `Choice`. `ended`: the hypotheses that ended with this step.
    `result`: the best of all it found, best first, once it is done.
    """

    number: int
    tokens: list[int]
    parents: list[int] | None
    live: list[bool]
    ended: list[Hypothesis] = field(default_factory=list)
    result: list[Hypothesis] | None = None

    @property
    def rows(self) -> list[Grown | None]:
        """How each of its rows grew; None for one that the end token completed, or that was given up."""
        parents = self.parents or range(len(self.tokens))
        return [
            Grown(parent, token) if live else None
            for parent, token, live in zip(parents, self.tokens, self.live, strict=True)
        ]


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
        return self._step()

    @torch.no_grad()
    def run(self) -> dict[int, list[Hypothesis]]:
        """Steps until nothing is left; each sentence's hypotheses by its number, best first."""
        results = {}
        while self.busy:
            results.update({event.number: event.result for event in self._step() if event.result is not None})
        return results

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[Event]:
        self._change_members()
        grid, decoding = self._grid, self._decoding
        if grid is None or decoding is None:
            return []
        scores = decoding.step(torch.tensor([token for mine in grid.tokens for token in mine]))
        device = scores.device
        choice = self.policy.choose(scores, grid, banned_ids(grid, device), forced_ids(grid, device))
        # One NaN or infinity in a row of logits shows in the sum over it. After the choice, so that a device doesn't
        # wait for the host between the two.
        check_finite(scores.log_z)
        return self._follow(grid, choice)

    def _follow(self, grid: Grid, choice: Choice) -> list[Event]:
        """Writes the choice into the grid and says what ended."""
        parents = choice.parents
        events = [
            Event(member.number, tokens, None if parents is None else parents[slot], live)
            for slot, (member, tokens, live) in enumerate(zip(grid.members, choice.tokens, choice.live, strict=True))
        ]
        for slot, row, log_prob in choice.ended:
            tokens = [*grid.members[slot].held(row), grid.members[slot].sentence.end_id]
            self._keep(grid.members[slot], events[slot], tokens, log_prob, finished=True)
        grid.tokens, grid.totals, grid.live, grid.parents = choice.tokens, choice.totals, choice.live, choice.parents
        for member, event, totals in zip(grid.members, events, grid.totals, strict=True):
            member.trail.append((event.tokens, event.parents))
            if True in event.live and len(member.trail) < member.limit:
                best_live = max(compress(totals, event.live))
                if not self.policy.is_done(member, best_live):
                    continue
            self._done(member, event, totals)
        return events

    def _done(self, member: Member, event: Event, totals: list[float]) -> None:
        """Keeps live rows of a sentence at its longest, unfinished as they are, and lets it go."""
        if len(member.trail) >= member.limit:
            for row, live in enumerate(event.live):
                if live:
                    self._keep(member, event, member.held(row), totals[row], finished=False)
        if not member.found:  # every continuation was impossible: still one target a sentence
            self._keep(member, event, member.held(0), totals[0], finished=False)
        member.gone = True
        event.result = ranked(member.found)[: member.config.n_best]

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
        if newcomers or len(running) < len(self._grid.members):
            self._replace(running, newcomers)
        moves = self._grid.moves()
        if moves is not None:
            self._decoding.reorder(moves)
        self._grid.parents = None

    def _replace(self, running: list[int], newcomers: list[tuple[Member, Sequence[int]]]) -> None:
        """Only the slots `running` stay; newcomers take the others' places, and places that are left over go."""
        assert self._grid is not None and self._decoding is not None
        B, n = len(self._grid.members), len(newcomers)
        if n > B - len(running):
            self._rebuild(running, newcomers)
            return
        free = sorted({*range(B)} - {*running})
        order = list(range(B))
        if newcomers:
            self._decoding.admit(free[:n], self._started(newcomers, None))
            for index, slot in enumerate(free[:n]):
                order[slot] = B + index
        left = {*range(B)} - {*free[n:]}
        # The last ones fill the gaps: few sentences change their place.
        last = sorted(slot for slot in left if slot >= len(left))
        keep = [slot if slot in left else last.pop() for slot in range(len(left))]
        if len(keep) < B:
            self._decoding.compact(torch.tensor(keep))
        entering = self._new_grid([member for member, _ in newcomers]) if newcomers else None
        self._grid.changed([order[slot] for slot in keep], entering)

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
