"""Is decoding with a cache the same as without? Every logit, every token, every score, and PyTorch as the judge."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from translator.cache import CACHE_KINDS
from translator.checkpoint import Checkpoint
from translator.diagnostics.parity.bench import PATHS, Bench, SpecialIds
from translator.diagnostics.parity.scenarios import LIFE_POSITIONS, run, scenarios
from translator.diagnostics.parity.tally import TOLERANCES, Check, Tally, TokenDifference
from translator.diagnostics.subject import ModelSubject, Subject
from translator.diagnostics.tables import as_text
from translator.errors import UserError
from translator.search.base import check_finite

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCH = 12
FEWEST_LINES = 6
SHORTEST_BEAM = 3

# Of many lengths, so that batches are ragged; bytes stand in for what a tokenizer doesn't know.
LINES = (
    "Yes.",
    "Where is the station?",
    "She has been learning to play the violin for three years.",
    "今天天气很好。",
    "The committee, which had not met since the spring, finally agreed on a date and told nobody about it.",
    "No, thank you.",
    "How much does this cost?",
    "我们明天早上八点在车站见面吧。",
    "If it rains tomorrow, we will stay at home and read.",
    "Two plus two is 4, not 5; anyone can check that with their fingers.",
    "Stop!",
    "An old man who lived by the sea told me that the tide takes back everything it brings, sooner or later.",
)

Progress = Callable[[int, int], None]
"""Called with checks done and checks in all."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What `check_parity` found. `passed` decides the exit status: no check failed; a tie is no failure."""

    sentences: int
    checks: list[Check]

    @property
    def positions(self) -> int:
        """Logit vectors of given tokens that a verdict was reached on."""
        return sum(check.tally.positions for check in self.judged)

    @property
    def searches(self) -> int:
        """Sentences whose searches a verdict was reached on."""
        return sum(check.tally.searches for check in self.judged)

    @property
    def judged(self) -> list[Check]:
        """The checks that decide; the others are reported, or had nothing to compare with."""
        return [check for check in self.checks if check.verdict not in ("reported", "skipped")]

    @property
    def passed(self) -> bool:
        """Whether something was judged and nothing failed."""
        return bool(self.judged) and all(check.verdict != "FAIL" for check in self.judged)

    def __str__(self) -> str:
        return "\n".join([as_text(report_table(self)), *report_notes(self), report_summary(self)])


def check_parity(
    checkpoint: Checkpoint,
    lines: Sequence[str] | None = None,
    *,
    kinds: Iterable[str] = CACHE_KINDS,
    beam_size: int = 4,
    max_tokens: int = 32,
    progress: Progress | None = None,
) -> ParityReport:
    """Compares cached decoding of `lines` with both references, for each container and each of `DTYPES`.

    Fewer than six lines get the built-in ones for company, so that batches are ragged. Targets have at most
    `max_tokens` tokens. Raises `UserError` for a beam below 3, an unknown kind, a model too short to be tested, or one
    that gives NaN.
    """
    config, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    if beam_size < SHORTEST_BEAM:
        raise UserError(f"a parity check needs a beam of {SHORTEST_BEAM} or more, not {beam_size}: fewer hide faults")
    if config.max_positions < LIFE_POSITIONS or max_tokens < 2:
        raise UserError(f"a parity check needs a model of {LIFE_POSITIONS} positions or more, and targets of 2 tokens")
    texts = [*(lines or ()), *(LINES if len(lines or ()) < FEWEST_LINES else ())]
    limit = config.max_positions - 1
    sources = [[*tokenizer.encode(text)[:limit], tokenizer.eos_id] for text in texts]
    special = SpecialIds(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    starts = range(0, len(sources), BATCH)
    subjects = [ModelSubject(checkpoint.model, sources[start : start + BATCH], special.pad) for start in starts]
    return parity_of(
        subjects, special, kinds=kinds, dtypes=DTYPES, beam_size=beam_size, max_tokens=max_tokens, progress=progress
    )


def parity_of(
    subjects: Sequence[Subject],
    special: SpecialIds,
    *,
    kinds: Iterable[str],
    dtypes: Sequence[torch.dtype],
    beam_size: int,
    max_tokens: int,
    progress: Progress | None = None,
) -> ParityReport:
    """As `check_parity`, on any subjects: batches of sentences of one decoder."""
    plan = scenarios(kinds, beam_size)
    total, done, checks = len(dtypes) * len(plan) * len(subjects), 0, []
    for dtype in dtypes:
        tallies = {key: Tally() for key in plan}
        first_line = 1
        for subject in subjects:
            longest = min(max_tokens, subject.max_positions)
            bench = Bench(
                subject.in_dtype(dtype), special=special, beams=beam_size, longest=longest, first_line=first_line
            )
            first_line += bench.sentences
            # What PyTorch's own decoder can't compute is no fault of a cache.
            rows = [(index, tuple(bench.tokens[index, :longest].tolist())) for index in range(bench.sentences)]
            check_finite(bench.logits(bench.paths[-1], rows, 0))
            for key, scenario in plan.items():
                run(scenario, bench, tallies[key])
                done += 1
                if progress:
                    progress(done, total)
        checks += [Check(dtype, kind, name, tally) for (kind, name), tally in tallies.items()]
    return ParityReport(sum(len(subject.source_lengths) for subject in subjects), checks)


def report_table(report: ParityReport) -> Table:
    """One row for each check, |Δlogit| against both references."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("type", "left"),
        ("cache", "left"),
        ("check", "left"),
        ("compared", "left"),
        ("max |Δlogit| uncached", "right"),
        ("max |Δlogit| PyTorch", "right"),
        ("relative", "right"),
        ("verdict", "left"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for check in report.checks:
        tally = check.tally
        table.add_row(
            type_name(check.dtype),
            check.kind,
            check.name,
            _compared(tally),
            *(f"{tally.worst[path]:.1e}" if path in tally.worst else "-" for path in PATHS),
            f"{tally.largest / tally.scale:.1e}" if tally.scale else "-",
            check.verdict,
        )
    return table


def _compared(tally: Tally) -> str:
    counts = ((tally.positions, "positions"), (tally.searches, "searches"))
    return ", ".join(f"{count:,} {name}" for count, name in counts if count) or "nothing"


def report_notes(report: ParityReport) -> list[str]:
    """A line for each first differing token and each error."""
    notes = []
    for check in report.checks:
        where = f"{type_name(check.dtype)}, {check.kind}, {check.name}"
        notes += [f"{where}: left out, {refused}" for refused in sorted(check.tally.refused)]
        notes += [f"{where}: skipped, {check.tally.skipped}"] if check.tally.skipped else []
        notes += [f"{where}: {error}" for error in check.tally.errors]
        notes += [f"{where}: {_describe(check, difference)}" for difference in check.tally.differences]
    return notes


def report_summary(report: ParityReport) -> str:
    """The count, in one line."""
    verdicts = [check.verdict for check in report.judged]
    ties = verdicts.count("tie")
    tied = f", {ties} tie{'s' if ties > 1 else ''}" if ties else ""
    return (
        f"parity: {report.positions:,} positions and {report.searches:,} searches, "
        f"{verdicts.count('pass')} of {len(verdicts)} checks passed{tied}"
    )


def _describe(check: Check, difference: TokenDifference) -> str:
    tokens = ["nothing" if token is None else f"id {token}" for token in (difference.token, difference.expected)]
    gap = "not measurable" if math.isnan(difference.gap) else f"{difference.gap:.1e} nats"
    verdict = "a difference"
    if check.dtype in TOLERANCES:
        verdict = "a tie" if check.is_tie(difference) else "NOT a tie"
    return (
        f"line {difference.line}, hypothesis {difference.rank + 1}, token {difference.position + 1}: {tokens[0]}, "
        f"where {difference.against} has {tokens[1]}; gap {gap}: {verdict}"
    )


def type_name(dtype: torch.dtype) -> str:
    """`"float64"` for `torch.float64`."""
    return str(dtype).removeprefix("torch.")
