"""What a cache is put through. Each scenario compares every logit it produces with both paths that need no cache."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from translator.cache import CACHE_KINDS, CacheSpec, UnsupportedCacheOperation, container_of
from translator.diagnostics.parity.bench import PATHS, Bench, Row
from translator.diagnostics.parity.searches import (
    RecordedCacheDecoding,
    compare_results,
    compare_turns,
    reference_search,
    run_search,
)
from translator.diagnostics.parity.tally import Tally
from translator.errors import UserError

LIFE_POSITIONS = 16
"""Target positions that `life` needs."""

# Small, so that a short script makes a growing container grow, and one view isn't a whole number of blocks.
FIRST_SLOTS, CAPACITY, BLOCK = 4, 20, 8

# One token at a time, several, and everything at once; repeated until the targets are used up.
STEP_LENGTHS: tuple[tuple[int, ...], ...] = ((1,), (1, 4, 3, 2, 7), (1 << 30,))


class Grid:
    """A cache, and beside it a plain record: for each sentence of the grid, its rows' sentence and tokens.

    Every operation is done to both. Logits of steps are kept until the record changes other than by growing, then
    compared with what the references say of the record.
    """

    def __init__(
        self,
        bench: Bench,
        tally: Tally,
        sentences: Sequence[int],
        kind: str,
        *,
        beams: int = 1,
        capacity: int = CAPACITY,
        block: int = 1,
    ) -> None:
        """`block` is the unit of the views that attention gets; see `CacheSpec`."""
        self.bench = bench
        self.tally = tally
        needed = CACHE_KINDS[kind].needs_capacity
        spec = CacheSpec(kind=kind, capacity=capacity if needed else FIRST_SLOTS, beams=beams, block=block)
        self.cache = bench.start(sentences, spec)
        self.grid: list[list[Row]] = [[(sentence, ())] * beams for sentence in sentences]
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.fed = 0

    @property
    def rows(self) -> list[Row]:
        """All rows, sentence by sentence."""
        return [row for rows in self.grid for row in rows]

    def lengths(self) -> Tensor:
        """Tokens in each row `(rows,)`, by the record."""
        return torch.tensor([len(tokens) for _, tokens in self.rows])

    def step(self, T: int) -> None:
        """Feeds every row T tokens of its own."""
        before = self.lengths()
        tokens = self.bench.tokens[: len(before), self.fed : self.fed + T]
        self.fed += T
        logits = self.bench.subject.cached(tokens.to(self.bench.subject.device), self.cache)
        self.pending.append((before, logits))
        grown = [(row[0], (*row[1], *new)) for row, new in zip(self.rows, tokens.tolist(), strict=True)]
        K = len(self.grid[0])
        self.grid = [grown[b * K : (b + 1) * K] for b in range(len(self.grid))]

    def check(self) -> None:
        """Compares what the steps since the last check gave, at every position."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        rows, since = self.rows, min(int(before.min()) for before, _ in pending)
        for path in self.bench.paths:
            expected = self.bench.logits(path, rows, since)
            for before, logits in pending:
                places = before.unsqueeze(1) + torch.arange(logits.shape[1]) - since
                picked = expected[torch.arange(len(rows)).unsqueeze(1), places]
                self.tally.compare(path, logits, picked)

    def expand(self, beams: int) -> None:
        """Gives every sentence `beams` rows."""
        self.check()
        self.cache.expand(beams)
        self.grid = [rows * beams for rows in self.grid]

    def reorder(self) -> None:
        """Moves every sentence's beams, differently in each, one of them twice and one not at all."""
        self.check()
        B, K = len(self.grid), len(self.grid[0])
        beam = (torch.arange(K) + torch.arange(B).unsqueeze(1) + 1) % K
        beam[:, -1] = beam[:, 0]
        self.cache.reorder(beam)
        self.grid = [[self.grid[b][k] for k in parents] for b, parents in enumerate(beam.tolist())]

    def compact(self, keep: list[int]) -> None:
        """Goes on with these sentences, in this order."""
        self.check()
        self.cache.compact(torch.tensor(keep))
        self.grid = [self.grid[b] for b in keep]

    def crop(self, lengths: Tensor) -> None:
        """Shortens the rows to `lengths` `(rows,)`; a state that can't says so, and nothing has changed."""
        self.check()
        try:
            self.cache.crop(lengths)
        except UnsupportedCacheOperation as refused:
            self.tally.refused.add(str(refused))
            return
        wanted = iter(lengths.tolist())
        self.grid = [[(row[0], row[1][: next(wanted)]) for row in rows] for rows in self.grid]

    def admit(self, slot: int, newcomer: "Grid") -> None:
        """Lets the one sentence of `newcomer` take the place of `slot`."""
        self.check()
        newcomer.check()
        self.cache.admit(slot, newcomer.cache)
        K = len(self.grid[slot])
        self.grid[slot] = newcomer.grid[0] * (K // len(newcomer.grid[0]))

    def reset(self, newcomers: "Grid | None" = None) -> None:
        """Empties every row; with `newcomers`, their sentences are decoded next."""
        self.check()
        self.cache.reset(newcomers.cache if newcomers else None)
        sentences = [rows[0][0] for rows in (newcomers or self).grid]
        self.grid = [[(sentence, ())] * len(rows) for sentence, rows in zip(sentences, self.grid, strict=True)]

    @torch.no_grad()
    def poison(self, T: int, *, commit: bool) -> None:
        """Writes T tokens of NaN and takes them back: a slot that isn't cleaned shows, masked or not."""
        self.check()
        before, decoder = self.lengths(), self.bench.subject.decoder
        commit = commit and not self.tally.refused  # what can't be cropped can't be taken back
        x = next(decoder.parameters()).new_full((len(before), T, decoder.stack[0].multihead_attn.embed_dim), math.nan)
        if commit:
            decoder.step(x, self.cache, decoder.operations())
            self.cache.crop(before)
            return
        step = self.cache.begin(T)
        for layer, layer_step, ops in zip(decoder.stack, step.layers, decoder.operations().layers, strict=True):
            x = layer.run(x, layer_step, ops)
        self.cache.rollback()


def teacher_forced(bench: Bench, kind: str, tally: Tally) -> None:
    """Given tokens over all sentences as one ragged batch, in steps of one, of several, and all at once."""
    for lengths in STEP_LENGTHS:
        grid = Grid(bench, tally, range(bench.sentences), kind, capacity=bench.longest)
        turn = 0
        while grid.fed < bench.longest:
            grid.step(min(lengths[turn % len(lengths)], bench.longest - grid.fed))
            turn += 1
        grid.check()


def life(bench: Bench, kind: str, tally: Tally) -> None:
    """Everything that can happen to a grid of beams, in views as short as they can be and in blocks."""
    for block in (1, BLOCK):
        _grown_and_cut(bench, kind, tally, block)
        _reused(bench, kind, tally, block)


def _grown_and_cut(bench: Bench, kind: str, tally: Tally, block: int) -> None:
    """Beams that part, move, lose sentences, differ in length and lose tokens again."""
    grid = Grid(bench, tally, _pick(bench, 0, 1, 2, 3), kind, block=block)
    grid.step(2)
    grid.expand(bench.beams)
    grid.step(1)
    grid.step(1)
    grid.reorder()
    grid.step(3)
    grid.compact([2, 0, 3])
    grid.step(1)
    grid.crop(grid.lengths() - torch.arange(len(grid.rows)) % 3)
    grid.step(2)
    grid.poison(2, commit=True)
    grid.step(1)
    grid.reorder()
    grid.step(1)
    grid.poison(2, commit=False)
    grid.step(1)
    grid.compact([1])
    grid.step(1)
    grid.check()


def _reused(bench: Bench, kind: str, tally: Tally, block: int) -> None:
    """Sentences that take a finished one's place, and a grid that is emptied and used again."""
    grid = Grid(bench, tally, _pick(bench, 0, 1, 2), kind, beams=bench.beams, block=block)
    grid.step(1)
    grid.reorder()
    grid.step(3)
    newcomer = Grid(bench, tally, _pick(bench, 3), kind)
    newcomer.step(3)
    grid.admit(0, newcomer)
    grid.step(1)
    grid.step(2)
    parted = Grid(bench, tally, _pick(bench, 4), kind, beams=bench.beams)
    parted.step(1)
    grid.admit(1, parted)
    grid.admit(2, Grid(bench, tally, _pick(bench, 5), kind))
    grid.compact([1, 2, 0])
    grid.step(1)
    grid.step(3)
    grid.crop(torch.full((len(grid.rows),), 2))
    grid.step(4)
    grid.reset()
    grid.step(3)
    grid.step(1)
    grid.reset(Grid(bench, tally, _pick(bench, 5, 0, 4), kind, beams=bench.beams))
    grid.step(2)
    grid.step(1)
    grid.check()


def _pick(bench: Bench, *sentences: int) -> list[int]:
    """These sentences of the bench, from the start again where it has fewer."""
    return [sentence % bench.sentences for sentence in sentences]


def whole_search(bench: Bench, kind: str, tally: Tally, *, beams: int) -> None:
    """A search to its end, sentences finishing at different steps."""
    decoding = RecordedCacheDecoding(bench, kind, beams)
    references = {path: reference_search(bench, path, beams) for path in bench.paths}
    try:
        searched = run_search(decoding)
    finally:  # what a search did before it raised still tells how far off it was
        parted = {path: compare_turns(tally, path, decoding.turns, known.turns) for path, known in references.items()}
    for path, known in references.items():
        compare_results(tally, path, searched, known, parted=parted[path], first_line=bench.first_line)


def uncached_path(bench: Bench, tally: Tally) -> None:
    """The reference itself, against another implementation: given tokens and whole searches."""
    if len(bench.paths) < 2:
        tally.skipped = "this structure has no reference of its own to set beside the uncached path"
        return
    tally.compare("torch", *(bench.logits(path, _given_rows(bench), 0) for path in PATHS))
    for beams in (1, bench.beams):
        mine, theirs = (reference_search(bench, path, beams) for path in PATHS)
        parted = compare_turns(tally, "torch", mine.turns, theirs.turns)
        compare_results(tally, "torch", mine, theirs, parted=parted, first_line=bench.first_line)


def later_tokens(bench: Bench, tally: Tally) -> None:
    """Neither reference may look ahead: other tokens in the second half leave the first half's logits as they were."""
    rows, half, V = _given_rows(bench), bench.longest // 2, bench.subject.vocab_size
    changed = [(s, (*tokens[:half], *((token + 1) % V for token in tokens[half:]))) for s, tokens in rows]
    for path in bench.paths:
        tally.compare(path, bench.logits(path, changed, 0)[:, :half], bench.logits(path, rows, 0)[:, :half])


def _given_rows(bench: Bench) -> list[Row]:
    return [(s, tuple(bench.tokens[s, : bench.longest].tolist())) for s in range(bench.sentences)]


Scenario = Callable[[Bench, Tally], None]


def scenarios(kinds: Iterable[str], beams: int) -> dict[tuple[str, str], Scenario]:
    """Everything there is to check, by cache kind ("-" where no cache is involved) and name.

    Raises `UserError` for a kind that isn't known.
    """
    plan: dict[tuple[str, str], Scenario] = {("-", "whole prefix"): uncached_path, ("-", "later tokens"): later_tokens}
    for kind in kinds:
        if (loses := container_of(kind).loses) is not None:
            raise UserError(f"cache kind {kind!r} is approximate, {loses}: parity is for those that change nothing")
        plan[kind, "given tokens"] = functools.partial(_with_cache, kind, teacher_forced)
        plan[kind, "life of a grid"] = functools.partial(_with_cache, kind, life)
        for width, name in ((1, "greedy"), (beams, f"beam {beams}")):
            plan[kind, name] = functools.partial(_with_cache, kind, functools.partial(whole_search, beams=width))
    return plan


def _with_cache(kind: str, scenario: Callable[[Bench, str, Tally], None], bench: Bench, tally: Tally) -> None:
    scenario(bench, kind, tally)


def run(scenario: Scenario, bench: Bench, tally: Tally) -> None:
    """Runs one scenario; what it raises is noted, as a finding. Programming errors of the harness itself are not."""
    try:
        scenario(bench, tally)
    except (RuntimeError, ValueError, IndexError) as error:
        tally.errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
