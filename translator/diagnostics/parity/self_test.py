"""Would the parity check notice? Faults are planted one by one, and each has to be found by a wide margin."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from translator.cache import CACHE_KINDS
from translator.config import ModelConfig
from translator.diagnostics.parity import grid_faults, page_faults, step_faults, table_faults
from translator.diagnostics.parity.bench import Bench, SpecialIds
from translator.diagnostics.parity.check import Progress
from translator.diagnostics.parity.faults import REQUIRED, Fault
from translator.diagnostics.parity.scenarios import LIFE_POSITIONS, run, scenarios
from translator.diagnostics.parity.tally import Check, Tally
from translator.diagnostics.subject import ModelSubject
from translator.diagnostics.tables import as_text
from translator.errors import UserError
from translator.model import TranslationModel

FAULTS: tuple[Fault, ...] = (*step_faults.FAULTS, *grid_faults.FAULTS, *table_faults.FAULTS, *page_faults.FAULTS)

WIDE = 1e-6
"""The least |Δlogit|, or difference of scores, in float64 by which a fault has to show."""

MARGIN = 5
"""In other types: by how many times the tolerance."""

BEAMS, LONGEST = 3, 16
SOURCE_LENGTHS = (9, 2, 5, 1, 7, 3)


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What the parity check made of one fault, planted with one container."""

    fault: Fault
    kind: str
    checks: list[Check]

    @property
    def size(self) -> float:
        """The largest |Δlogit| or difference of scores; infinite for a NaN."""
        return max(max(check.tally.largest, check.tally.score_difference) for check in self.checks)

    @property
    def error(self) -> str:
        """The first error raised, or nothing."""
        return next((error for check in self.checks for error in check.tally.errors), "")

    @property
    def tokens_differ(self) -> bool:
        """Whether a search chose other tokens, ties apart."""
        return any(not check.is_tie(difference) for check in self.checks for difference in check.tally.differences)

    @property
    def caught(self) -> bool:
        """Whether it showed by a wide margin: in numbers, in tokens, or by an error."""
        return self.tokens_differ or bool(self.error) or any(_shows(check) for check in self.checks)


def _shows(check: Check) -> bool:
    wide = WIDE if check.dtype == torch.float64 else MARGIN * check.limit
    return max(check.tally.largest, check.tally.score_difference) >= wide


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What `self_test` found: the same checks without a fault, and with each one, for every container."""

    clean: list[Check]
    outcomes: list[FaultOutcome]
    inapplicable: frozenset[tuple[str, str]] = frozenset()
    """Faults, with containers, that this decoder can't have."""

    @property
    def kinds(self) -> list[str]:
        """The containers tried."""
        return list(dict.fromkeys(check.kind for check in self.clean if check.kind != "-"))

    @property
    def clean_passed(self) -> bool:
        """Whether every check passed without a fault."""
        return bool(self.clean) and all(check.verdict in ("pass", "skipped") for check in self.clean)

    @property
    def missing(self) -> list[str]:
        """Faults that every self-test must plant with every container, and this one didn't with all."""
        planted = {(outcome.fault.name, outcome.kind) for outcome in self.outcomes} | self.inapplicable
        return [name for name in REQUIRED if not all((name, kind) in planted for kind in self.kinds)]

    @property
    def passed(self) -> bool:
        """Whether all that had to be planted was, all was caught, and nothing was caught where nothing was."""
        return self.clean_passed and not self.missing and all(outcome.caught for outcome in self.outcomes)

    def __str__(self) -> str:
        table = as_text(self_test_table(self), width=100 + 20 * len(self.kinds))  # a column for each kind
        return "\n".join([table, *self_test_notes(self), self_test_summary(self)])


def random_model(seed: int = 3) -> TranslationModel:
    """A small model with large weights, LayerNorm gains and biases, so that no fault hides behind a near-zero.

    The default seed gives searches that end at many different lengths, some by the end token.
    """
    config = ModelConfig(
        vocab_size=19,
        d_model=16,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=24,
        max_positions=32,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = TranslationModel(config).double()
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.5)
    return model.eval()


def self_test(
    model: TranslationModel | None = None,
    *,
    kinds: Iterable[str] = CACHE_KINDS,
    faults: Sequence[Fault] = FAULTS,
    progress: Progress | None = None,
) -> SelfTestReport:
    """Runs all scenarios over each container in float64, as they are and with each fault planted.

    On `model`, or a small random one. Raises `UserError` for a model too short to be tested.
    """
    return self_test_of(self_test_bench(model or random_model()), kinds=kinds, faults=faults, progress=progress)


def self_test_of(
    bench: Bench,
    *,
    kinds: Iterable[str] = CACHE_KINDS,
    faults: Sequence[Fault] = FAULTS,
    progress: Progress | None = None,
) -> SelfTestReport:
    """As `self_test`, on any bench; only faults are planted that this decoder and container can have."""
    kinds = list(kinds)
    decoder = bench.subject.decoder
    pairs = [(fault, kind) for kind in kinds for fault in faults]
    planned = [(fault, kind) for fault, kind in pairs if fault.applies(CACHE_KINDS[kind], decoder)]
    total = len(planned) + 1
    clean, outcomes = _measure(bench, kinds), []
    for done, (fault, kind) in enumerate(planned, 1):
        if progress:
            progress(done, total)
        with fault.planted(CACHE_KINDS[kind]):
            outcomes.append(FaultOutcome(fault, kind, _measure(bench, [kind])))
    bench.forget_uncached()
    if progress:
        progress(total, total)
    inapplicable = {(fault.name, kind) for fault, kind in pairs} - {(fault.name, kind) for fault, kind in planned}
    return SelfTestReport(clean, outcomes, frozenset(inapplicable))


def self_test_bench(model: TranslationModel) -> Bench:
    """The sentences that a self-test decodes, random ids of ragged lengths, and a copy of `model` in float64."""
    config = model.config
    if config.max_positions <= LIFE_POSITIONS:
        raise UserError(f"a self-test needs a model of more than {LIFE_POSITIONS} positions")
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in SOURCE_LENGTHS]
    longest = min(LONGEST, config.max_positions - 1)  # a position off by one must be wrong, not impossible
    subject = ModelSubject(model, sources).in_dtype(torch.float64)
    return Bench(subject, special=SpecialIds(), beams=BEAMS, longest=longest)


def _measure(bench: Bench, kinds: Iterable[str]) -> list[Check]:
    bench.forget_uncached()
    checks = []
    for (kind, name), scenario in scenarios(kinds, bench.beams).items():
        tally = Tally()
        run(scenario, bench, tally)
        checks.append(Check(bench.subject.dtype, kind, name, tally))
    return checks


def self_test_table(report: SelfTestReport) -> Table:
    """One row for each fault, the clean run first; under each container by how much it showed, or that it raised."""
    table = Table(box=None, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for kind in report.kinds:
        table.add_column(f"{kind} max |Δ|", justify="right", no_wrap=True)
    table.add_column("checks failed", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what is wrong")
    clean = [
        FaultOutcome(NO_FAULT, kind, [check for check in report.clean if check.kind in ("-", kind)])
        for kind in report.kinds
    ]
    table.add_row(*_row(clean, report.kinds, "passed" if report.clean_passed else "FAILED"))
    by_name: dict[str, list[FaultOutcome]] = {}
    for outcome in report.outcomes:
        by_name.setdefault(outcome.fault.name, []).append(outcome)
    for outcomes in by_name.values():
        missed = [outcome.kind for outcome in outcomes if not outcome.caught]
        table.add_row(*_row(outcomes, report.kinds, f"MISSED: {', '.join(missed)}" if missed else "caught"))
    return table


NO_FAULT = Fault("(none)", "nothing: the checks as they are", None, "", lambda: None)


def _row(outcomes: Sequence[FaultOutcome], kinds: Sequence[str], verdict: str) -> list[str]:
    by_kind = {outcome.kind: outcome for outcome in outcomes}
    checks = [check for outcome in outcomes for check in outcome.checks]
    failed = sum(check.verdict not in ("pass", "skipped") for check in checks)
    return [
        outcomes[0].fault.name,
        *(_size(by_kind[kind]) if kind in by_kind else "-" for kind in kinds),
        f"{failed} of {len(checks)}",
        verdict,
        outcomes[0].fault.description,
    ]


def _size(outcome: FaultOutcome) -> str:
    if outcome.error and outcome.size < WIDE:
        return "raised"
    return "NaN" if math.isinf(outcome.size) else f"{outcome.size:.1e}"


def self_test_notes(report: SelfTestReport) -> list[str]:
    """A line for each fault that wasn't planted and had to be, and each failure of the clean run."""
    notes = [f"not planted: {name}" for name in report.missing]
    return notes + [
        f"clean run, {check.kind}, {check.name}: {'; '.join(check.tally.errors) or check.verdict}"
        for check in report.clean
        if check.verdict not in ("pass", "skipped")
    ]


def self_test_summary(report: SelfTestReport) -> str:
    """The count, in one line: a fault counts once for each container it was planted with."""
    caught = sum(outcome.caught for outcome in report.outcomes)
    each = ", ".join(
        f"{kind} {sum(outcome.caught for outcome in report.outcomes if outcome.kind == kind)}" for kind in report.kinds
    )
    largest = max((check.tally.largest for check in report.clean), default=0.0)
    verdict = "passed" if report.clean_passed else "FAILED"
    return (
        f"self-test: {caught} of {len(report.outcomes)} planted faults caught ({each}), "
        f"clean run {verdict} (max |Δlogit| {largest:.1e})"
    )
