"""Would the parity check notice? Faults are planted one by one, and each has to be found by a wide margin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from translator.cache import CACHE_KINDS
from translator.config import ModelConfig
from translator.diagnostics import grid_faults, step_faults
from translator.diagnostics.bench import Bench, SpecialIds
from translator.diagnostics.faults import REQUIRED, Fault
from translator.diagnostics.parity import Progress, in_dtype
from translator.diagnostics.scenarios import LIFE_POSITIONS, run, scenarios
from translator.diagnostics.tally import Check, Tally
from translator.errors import UserError
from translator.model import TranslationModel

FAULTS: tuple[Fault, ...] = (*step_faults.FAULTS, *grid_faults.FAULTS)

WIDE = 1e-6
"""The least |Δlogit|, or difference of scores, in float64 by which a fault has to show."""

BEAMS, LONGEST = 3, 16
SOURCE_LENGTHS = (9, 2, 5, 1, 7, 3)


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What the parity check made of one planted fault."""

    fault: Fault
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
        return self.size >= WIDE or self.tokens_differ or bool(self.error)


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What `self_test` found: the same checks without a fault, and with each one."""

    clean: list[Check]
    outcomes: list[FaultOutcome]

    @property
    def clean_passed(self) -> bool:
        """Whether every check passed without a fault."""
        return bool(self.clean) and all(check.verdict == "pass" for check in self.clean)

    @property
    def missing(self) -> list[str]:
        """Faults that every self-test must plant and this one didn't."""
        planted = {outcome.fault.name for outcome in self.outcomes}
        return [name for name in REQUIRED if name not in planted]

    @property
    def passed(self) -> bool:
        """Whether all that had to be planted was, all was caught, and nothing was caught where nothing was."""
        return self.clean_passed and not self.missing and all(outcome.caught for outcome in self.outcomes)


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
    model: TranslationModel | None = None, *, faults: Sequence[Fault] = FAULTS, progress: Progress | None = None
) -> SelfTestReport:
    """Runs all scenarios over all containers in float64, as they are and with each fault planted.

    On `model`, or a small random one; only faults that mean something with its number of layers are planted. Raises
    `UserError` for a model too short to be tested.
    """
    bench = self_test_bench(model or random_model())
    faults = [fault for fault in faults if fault.layers <= bench.model.config.num_decoder_layers]
    total = len(faults) + 1
    clean, outcomes = _measure(bench), []
    for done, fault in enumerate(faults, 1):
        if progress:
            progress(done, total)
        with fault.planted():
            outcomes.append(FaultOutcome(fault, _measure(bench)))
    if progress:
        progress(total, total)
    return SelfTestReport(clean, outcomes)


def self_test_bench(model: TranslationModel) -> Bench:
    """The sentences that a self-test decodes, random ids of ragged lengths, and a copy of `model` in float64."""
    config = model.config
    if config.max_positions <= LIFE_POSITIONS:
        raise UserError(f"a self-test needs a model of more than {LIFE_POSITIONS} positions")
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in SOURCE_LENGTHS]
    longest = min(LONGEST, config.max_positions - 1)  # a position off by one must be wrong, not impossible
    return Bench(in_dtype(model, torch.float64), sources, special=SpecialIds(), beams=BEAMS, longest=longest)


def _measure(bench: Bench) -> list[Check]:
    bench.forget_uncached()
    checks = []
    for (kind, name), scenario in scenarios(CACHE_KINDS, bench.beams).items():
        tally = Tally()
        run(scenario, bench, tally)
        checks.append(Check(torch.float64, kind, name, tally))
    return checks


def self_test_table(report: SelfTestReport) -> Table:
    """One row for each fault, the clean run first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    table.add_column("max |Δ|", justify="right", no_wrap=True)
    table.add_column("checks failed", justify="right", no_wrap=True)
    table.add_column("raised", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what is wrong")
    clean = FaultOutcome(Fault("(none)", "nothing: the checks as they are", None, "", _measure), report.clean)
    for outcome in (clean, *report.outcomes):
        failed = sum(check.verdict != "pass" for check in outcome.checks)
        if outcome is clean:
            verdict = "passed" if report.clean_passed else "FAILED"
        else:
            verdict = "caught" if outcome.caught else "MISSED"
        table.add_row(
            outcome.fault.name,
            "NaN" if math.isinf(outcome.size) else f"{outcome.size:.1e}",
            f"{failed} of {len(outcome.checks)}",
            outcome.error.partition(":")[0] or "-",
            verdict,
            outcome.fault.description,
        )
    return table


def self_test_notes(report: SelfTestReport) -> list[str]:
    """A line for each fault that wasn't planted and had to be, and each failure of the clean run."""
    notes = [f"not planted: {name}" for name in report.missing]
    return notes + [
        f"clean run, {check.kind}, {check.name}: {'; '.join(check.tally.errors) or check.verdict}"
        for check in report.clean
        if check.verdict != "pass"
    ]


def self_test_summary(report: SelfTestReport) -> str:
    """The count, in one line."""
    caught = sum(outcome.caught for outcome in report.outcomes)
    largest = max((check.tally.largest for check in report.clean), default=0.0)
    verdict = "passed" if report.clean_passed else "FAILED"
    return (
        f"self-test: {caught} of {len(report.outcomes)} faults caught, clean run {verdict} (max |Δlogit| {largest:.1e})"
    )
