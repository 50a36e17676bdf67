"""Does the packed engine give the same bits in any company? Logits by `torch.equal`, tokens and scores by `==`.

What a sentence comes to alone, in one whole pass, is the reference for everything else: steps and chunks, random
batches in random order, every container, several threads. Searches alone are the reference for searches together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from translator.cache import CACHE_KINDS, CacheSpec, KeyValueState
from translator.checkpoint import Checkpoint
from translator.config import DecodeConfig
from translator.diagnostics.parity.check import LINES, Progress
from translator.diagnostics.tables import as_text
from translator.engine.exact import check_exact
from translator.engine.native.library import available, missing
from translator.engine.native.operations import Native
from translator.engine.native.steps import Steps
from translator.engine.native.weights import TYPES
from translator.engine.packed import PackedEngine
from translator.errors import UserError
from translator.padding import pad, padding
from translator.search import Driver, Hypothesis, Sentence, rows_per_sentence, starter

GROUP = 32
"""Sentences whose reference is in memory at once."""

LONG = ((200, 500), (1, 33))
"""Source and target tokens of generated sentences, as far as the model goes."""

LONGEST_GIVEN = 40
"""Target tokens that the other sentences get."""

THREADS = (1, 2, 3)
LONGEST_CHUNK = 17
LONGEST_SEARCHED = 60
"""Tokens of a search, but for greedy ones, which go as far as they may."""

ROOM = 3
"""Sentences decoded at once where others wait for their places."""


@dataclass(frozen=True, slots=True)
class Given:
    """A sentence: what to call it, its source ids, and target ids to be fed, the start token first."""

    name: str
    source: list[int]
    target: list[int]


@dataclass(slots=True)
class ExactCheck:
    """What was compared in one compute type, and the first difference in words, if any."""

    compute_type: str
    name: str
    positions: int = 0
    searches: int = 0
    difference: str = ""


@dataclass(slots=True)
class ExactReport:
    """What `exact_parity` found; `skipped` are compute types that can't hold the weights, and why."""

    sentences: int
    checks: list[ExactCheck] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check compared something and none found a difference."""
        compared = all(check.positions or check.searches for check in self.checks)
        return bool(self.checks) and compared and not any(check.difference for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([as_text(exact_table(self)), *exact_notes(self), exact_summary(self)])


def exact_parity(
    checkpoint: Checkpoint,
    lines: Sequence[str] = (),
    numbers: Sequence[int] = (),
    *,
    beam_size: int = 4,
    compute_types: Sequence[str] = tuple(TYPES),
    progress: Progress | None = None,
) -> ExactReport:
    """Compares `lines`, called by their `numbers` and by default the built-in ones, and a few long sentences.

    Raises `UserError` without native kernels, and for a model that exact mode refuses before anything is compared.
    """
    if not available():
        raise UserError(f"exact mode needs the native kernels, and there are none: {missing()}")
    groups = _groups(checkpoint, lines or LINES, numbers or range(1, len(lines or LINES) + 1))
    report = ExactReport(sum(map(len, groups)))
    searches = _searches(checkpoint.config.decode, beam_size)
    done, total = 0, len(compute_types) * len(groups) * (len(_WAYS) + len(searches))
    for compute_type in compute_types:
        try:
            engine = PackedEngine(checkpoint.model, compute_type)
        except UserError as error:
            report.skipped.append(f"{compute_type}: {error}")
            continue
        check_exact(engine)
        checks = {name: ExactCheck(compute_type, name) for name in (*_WAYS, *searches)}
        report.checks += checks.values()
        for group in groups:
            bench = _Bench(engine, group, checkpoint.tokenizer)
            for name, check in checks.items():
                compare = _WAYS[name] if name in _WAYS else _search_work(searches[name])
                compare(bench, check)
                done += 1
                if progress:
                    progress(done, total)
    return report


class _Bench:
    """A group of sentences in one engine: batches of them, and their references."""

    def __init__(self, engine: PackedEngine, group: Sequence[Given], tokenizer: Any) -> None:
        self.engine = engine
        self.group = group
        self.tokenizer = tokenizer
        self.generator = torch.Generator().manual_seed(len(group))
        self.whole = [self.one_pass([index])[0] for index in range(len(group))]
        """Logits `(T, V)` of each sentence alone."""

    def batches(self) -> Iterator[list[int]]:
        """The sentences in an order of chance, in batches of chance; a batch has two at least where there are two."""
        order = torch.randperm(len(self.group), generator=self.generator).tolist()
        while order:
            size = int(torch.randint(2, len(self.group) + 2, (), generator=self.generator))
            size = len(order) if len(order) - size == 1 else size
            batch, order = order[:size], order[size:]
            yield batch

    def memory(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Memory `(B, S, D)` of the batch and its padding."""
        sources = [self.group[index].source for index in batch]
        hidden = padding([len(source) for source in sources])
        return self.engine.encode(pad(sources, 0), hidden), hidden

    def targets(self, batch: Sequence[int]) -> Tensor:
        """`(B, T)`."""
        return pad([self.group[index].target for index in batch], 0)

    @torch.no_grad()
    def one_pass(self, batch: Sequence[int]) -> Tensor:
        """Logits `(B, T, V)` of whole targets under a causal mask."""
        engine = self.engine
        memory, hidden = self.memory(batch)
        return engine.operations.logits(engine.model.decode(self.targets(batch), memory, hidden, engine.operations))

    def spec(self, kind: str, batch: Sequence[int]) -> CacheSpec:
        """A container for the batch's targets."""
        return CacheSpec(kind=kind, capacity=max(len(self.group[index].target) for index in batch))

    def same(self, check: ExactCheck, sentence: int, since: int, logits: Tensor) -> None:
        """Compares logits `(n, V)` from position `since` on with the sentence's reference, up to its end."""
        expected = self.whole[sentence][since : since + len(logits)]
        logits = logits[: len(expected)]
        check.positions += len(logits)
        if check.difference or torch.equal(logits, expected):
            return
        at = next(
            i for i, (mine, known) in enumerate(zip(logits, expected, strict=True)) if not torch.equal(mine, known)
        )
        apart = float((logits[at].double() - expected[at].double()).abs().max())
        check.difference = f"{self.group[sentence].name}, position {since + at}: logits differ by up to {apart:.1e}"


# -- logits ----------------------------------------------------------------------------------------------------------


def _passes(bench: _Bench, check: ExactCheck) -> None:
    """One pass over a padded batch."""
    for batch in bench.batches():
        for index, logits in zip(batch, bench.one_pass(batch), strict=True):
            bench.same(check, index, 0, logits)


def _alone(bench: _Bench, check: ExactCheck) -> None:
    for index in range(len(bench.group)):
        _steps(bench, check, [index], bench.engine.cache_kind)


def _together(kind: str) -> Callable[[_Bench, ExactCheck], None]:
    def compare(bench: _Bench, check: ExactCheck) -> None:
        for batch in bench.batches():
            _steps(bench, check, batch, kind)
            _chunks(bench, check, batch, kind)

    return compare


def _with_threads(count: int) -> Callable[[_Bench, ExactCheck], None]:
    def compare(bench: _Bench, check: ExactCheck) -> None:
        with _threads(count):
            batch = list(range(len(bench.group)))
            for index, logits in zip(batch, bench.one_pass(batch), strict=True):
                bench.same(check, index, 0, logits)
            _steps(bench, check, batch, bench.engine.cache_kind)

    return compare


def _steps(bench: _Bench, check: ExactCheck, batch: Sequence[int], kind: str) -> None:
    """Token by token; a sentence leaves when its target ends."""
    memory, hidden = bench.memory(batch)
    decoding = bench.engine.start(memory, hidden, bench.spec(kind, batch))
    running, targets = list(batch), [bench.group[index].target for index in range(len(bench.group))]
    t = 0
    while running:
        logits = decoding.step(torch.tensor([targets[index][t] for index in running])).logits()
        for row, index in enumerate(running):
            bench.same(check, index, t, logits[row : row + 1])
        t += 1
        keep = [row for row, index in enumerate(running) if len(targets[index]) > t]
        if keep and len(keep) < len(running):
            decoding.compact(torch.tensor(keep))
        running = [running[row] for row in keep]


@torch.no_grad()
def _chunks(bench: _Bench, check: ExactCheck, batch: Sequence[int], kind: str) -> None:
    """Several tokens at once, as a prefix comes, on what is held already."""
    engine, operations = bench.engine, bench.engine.operations
    memory, hidden = bench.memory(batch)
    cache = engine.model.start(memory, hidden, bench.spec(kind, batch), operations=operations)

    def run(native: Native, x: Tensor, lengths: Tensor, steps: Sequence[Any]) -> Tensor:
        on = operations.on(native)
        return on.logits(engine.model.decoder.run(x, steps, on.decoder))

    steps, targets = Steps(operations.native, run, engine.model.decoder.structures), bench.targets(batch)
    while (held := cache.length) < targets.shape[1]:
        size = int(torch.randint(1, LONGEST_CHUNK + 1, (), generator=bench.generator))
        ids = targets[:, held : held + size]
        logits = steps.step(cache, operations.embed_target(ids, cache.positions(ids.shape[1])))
        for row, index in enumerate(batch):
            bench.same(check, index, held, logits[row])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_WAYS: dict[str, Callable[[_Bench, ExactCheck], None]] = {
    "steps, alone": _alone,
    "one pass, together": _passes,
    # What the kernels don't read where it lies goes to PyTorch's attention, which promises no bits.
    **{
        f"steps and chunks, {kind}": _together(kind)
        for kind, container in sorted(CACHE_KINDS.items())
        if getattr(container, "kernels_may_read", container.in_place is not KeyValueState.in_place)
    },
    **{f"{count} thread{'s' * (count > 1)}": _with_threads(count) for count in THREADS},
}


# -- searches --------------------------------------------------------------------------------------------------------


def _searches(config: DecodeConfig, beam_size: int) -> dict[str, DecodeConfig]:
    config = replace(config, search="auto", sampling=False, n_best=1, no_repeat_ngram_size=0)
    return {
        "greedy": replace(config, beam_size=1),
        f"beam {beam_size}": replace(config, beam_size=beam_size, n_best=beam_size),
        "sampling": replace(config, sampling=True, temperature=1.0, top_k=0, top_p=1.0),
        "sampling, top-p": replace(config, sampling=True, temperature=0.8, top_k=0, top_p=0.9, no_repeat_ngram_size=3),
    }


def _search_work(config: DecodeConfig) -> Callable[[_Bench, ExactCheck], None]:
    def compare(bench: _Bench, check: ExactCheck) -> None:
        everyone = list(range(len(bench.group)))
        shuffled = [index for batch in bench.batches() for index in batch]
        alone = [_searched(bench, [index], config, "dynamic", None)[index] for index in everyone]
        for order, kind, room in (
            (everyone, "indirect", None),
            (shuffled, "static", None),
            (shuffled, "indirect", ROOM),
        ):
            found = _searched(bench, order, config, kind, room)
            check.searches += len(found)
            for index in everyone:
                if found[index] != alone[index] and not check.difference:
                    check.difference = f"{bench.group[index].name}, {_parted(found[index], alone[index])}"

    return compare


def _searched(
    bench: _Bench, order: Sequence[int], config: DecodeConfig, kind: str, room: int | None
) -> dict[int, list[Hypothesis]]:
    """What each sentence comes to, these decoded together; with `room` they come and go."""
    tokenizer, engine = bench.tokenizer, bench.engine
    most = engine.max_positions if config.search_name == "greedy" else LONGEST_SEARCHED
    sentences = {
        index: Sentence(
            max_length=min(config.max_length(len(bench.group[index].source)), engine.max_positions, most),
            start_id=tokenizer.bos_id,
            end_id=tokenizer.eos_id,
            suppressed=(tokenizer.pad_id, tokenizer.bos_id),
            key=(index,),
        )
        for index in order
    }
    capacity = max(sentence.limit for sentence in sentences.values())
    spec = CacheSpec(kind=kind, capacity=capacity, beams=rows_per_sentence(config))
    driver = Driver(config, starter(engine, spec), room=room)
    by_number = {driver.add(sentence, bench.group[index].source): index for index, sentence in sentences.items()}
    return {by_number[number]: found for number, found in driver.run().items()}


def _parted(found: Sequence[Hypothesis], alone: Sequence[Hypothesis]) -> str:
    if len(found) != len(alone):
        return f"{len(found)} hypotheses together, {len(alone)} alone"
    rank, mine, known = next((i, a, b) for i, (a, b) in enumerate(zip(found, alone, strict=True)) if a != b)
    pairs = enumerate(zip([*mine.tokens, None], [*known.tokens, None], strict=False))
    for position, (token, expected) in pairs:
        if token != expected:
            return f"hypothesis {rank + 1}, position {position}: token {token} together, {expected} alone"
    return f"hypothesis {rank + 1}: score {mine.score!r} together, {known.score!r} alone"


# -- sentences and report --------------------------------------------------------------------------------------------


def _groups(checkpoint: Checkpoint, lines: Sequence[str], numbers: Sequence[int]) -> list[list[Given]]:
    """The lines in an order of chance, so that neighbours in a batch are none in the file; then the long sentences."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    limit = config.max_positions
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(4, config.vocab_size, (count,), generator=generator).tolist()

    texts = []
    for number, text in zip(numbers, lines, strict=True):
        source = [*tokenizer.encode(text)[: limit - 1], tokenizer.eos_id]
        length = 1 + int(torch.randint(min(LONGEST_GIVEN, limit - 1), (), generator=generator))
        texts.append(Given(f"line {number}", source, [tokenizer.bos_id, *ids(length - 1)]))
    order = torch.randperm(len(texts), generator=generator).tolist()
    groups = [[texts[index] for index in order[start : start + GROUP]] for start in range(0, len(order), GROUP)]
    long = [
        Given(f"generated sentence {number}", ids(min(S, limit)), [tokenizer.bos_id, *ids(min(T, limit) - 1)])
        for number, (S, T) in enumerate(LONG, 1)
    ]
    return [*groups, long]


def exact_table(report: ExactReport) -> Table:
    """One row a check."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    for heading in ("type", "compared with alone", "compared", "verdict"):
        table.add_column(heading, no_wrap=True)
    for check in report.checks:
        counts = ((check.positions, "positions"), (check.searches, "searches"))
        compared = ", ".join(f"{count:,} {name}" for count, name in counts if count) or "nothing"
        table.add_row(check.compute_type, check.name, compared, "DIFFERS" if check.difference else "equal")
    return table


def exact_notes(report: ExactReport) -> list[str]:
    """A line for the first difference of each check, and for each type left out."""
    found = [f"{one.compute_type}, {one.name}: {one.difference}" for one in report.checks if one.difference]
    return [*found, *(f"left out, {why}" for why in report.skipped)]


def exact_summary(report: ExactReport) -> str:
    """The counts, in one line."""
    positions, searches = (sum(getattr(one, name) for one in report.checks) for name in ("positions", "searches"))
    equal = sum(not one.difference for one in report.checks)
    return (
        f"exact: {report.sentences:,} sentences, {positions:,} positions and {searches:,} searches, "
        f"{equal} of {len(report.checks)} checks equal to the bit"
    )
