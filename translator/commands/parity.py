"""`translator parity`: the proof that a cache changes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from translator.bounds import MOST_LINES, MOST_ROWS
from translator.commands.options import CheckpointOption, DeviceOption, ThreadsOption, set_threads
from translator.console import input_lines, progress_bar, show, stream_name
from translator.errors import UserError

if TYPE_CHECKING:
    import torch

    from translator.diagnostics.parity.check import ParityReport
    from translator.model import TranslationModel

SAMPLE, BEAMS = 12, 4

EXAMPLES = (
    "translator parity",
    "translator parity --self-test",
    "translator parity --checkpoint checkpoints/mine/best --input dev.en",
)


def run(
    checkpoint: CheckpointOption = None,
    input: Annotated[
        Path | None, typer.Option(help="Sentences to check with, a few get company; - is standard input.")
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_LINES, help=f"Lines of --input to take, evenly spaced; {SAMPLE} by default."),
    ] = None,
    beam_size: Annotated[
        int | None,
        typer.Option(
            "--beam-size",
            min=1,
            max=MOST_ROWS,
            help=f"Beams of the beam search compared, 3 or more; {BEAMS} by default.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compare the packed engine with itself in other company instead, to the bit."),
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults and see whether the check catches each.")
    ] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Prove the cache: cached against uncached against PyTorch's own decoder, every logit, token and score.

    fp64 decides (1e-10), fp32 must agree to 1e-4, bf16 is reported. Exit status 1 on any fault.

    --exact: in every compute type, alone and in random batches, in every cache, by steps, chunks and whole passes,
    on 1, 2 and 3 threads; greedy, beam and sampling. Any difference is a fault.

    --self-test runs on a small random model, or on --checkpoint when one is given.
    """
    from translator.checkpoint import read_checkpoint
    from translator.device import usable_device

    _check_options(self_test, exact, input, lines, beam_size)
    set_threads(threads)
    where = usable_device(device)
    if self_test:
        passed = _self_test(read_checkpoint(checkpoint, where).model if checkpoint else None)
    elif exact:
        if where.type != "cpu":
            raise UserError(f"--exact: the packed engine runs on the CPU, not on {where}")
        passed = _exact(checkpoint, input, lines or SAMPLE, beam_size or BEAMS)
    else:
        passed = _parity(checkpoint, where, input, lines or SAMPLE, beam_size or BEAMS)
    if not passed:
        raise typer.Exit(1)


def _check_options(self_test: bool, exact: bool, input: Path | None, lines: int | None, beam_size: int | None) -> None:
    if self_test and exact:
        raise UserError("--exact: --self-test plants faults in caches; leave one of the two out")
    given = {"input": input, "lines": lines, "beam-size": beam_size}
    for name, value in given.items():
        if self_test and value is not None:
            raise UserError(f"--{name}: --self-test has sentences and beams of its own; leave one of the two out")
    if lines and input is None:
        raise UserError("--lines: goes with --input; without one, all built-in sentences are taken")


def _self_test(model: "TranslationModel | None") -> bool:
    from translator.diagnostics.parity import self_test as trial

    with progress_bar("planting faults") as advance:
        tested = trial.self_test(model, progress=advance)
    show(trial.self_test_table(tested), [*trial.self_test_notes(tested), trial.self_test_summary(tested)])
    return tested.passed


def _parity(checkpoint: Path | None, device: "torch.device", input: Path | None, most: int, beam_size: int) -> bool:
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.diagnostics.parity import check

    sample, numbers, said = _sample(input, most)
    loaded = read_checkpoint(checkpoint or DEFAULT_CHECKPOINT, device)
    with progress_bar("comparing") as advance:
        checked = check.check_parity(loaded, None if input is None else sample, beam_size=beam_size, progress=advance)
    if input is not None:
        _renumber(checked, numbers)
    show(check.report_table(checked), [*check.report_notes(checked), *said, check.report_summary(checked)])
    return checked.passed


def _exact(checkpoint: Path | None, input: Path | None, most: int, beam_size: int) -> bool:
    import torch

    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.diagnostics.parity import exact

    sample, numbers, said = _sample(input, most)
    loaded = read_checkpoint(checkpoint or DEFAULT_CHECKPOINT, torch.device("cpu"))
    with progress_bar("comparing") as advance:
        checked = exact.exact_parity(loaded, sample, numbers, beam_size=beam_size, progress=advance)
    show(exact.exact_table(checked), [*exact.exact_notes(checked), *said, exact.exact_summary(checked)])
    return checked.passed


def _sample(input: Path | None, most: int) -> tuple[list[str], list[int], list[str]]:
    """Lines of the file, their numbers, and what is to be said of them; nothing without a file."""
    if input is None:
        return [], [], []
    every = input_lines(input)
    numbers = spaced(len(every), most)
    return [every[number - 1] for number in numbers], numbers, [_sample_text(numbers, len(every), input)]


def spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 1 to `count`, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(1, count + 1))
    return [1 + step * (count - 1) // max(most - 1, 1) for step in range(most)]


def _sample_text(numbers: list[int], count: int, input: Path) -> str:
    if len(numbers) == count:
        return f"{stream_name(input)}: all {count:,} lines"
    some = [*map(str, numbers[:4]), "…", str(numbers[-1])] if len(numbers) > 5 else map(str, numbers)
    return (
        f"{stream_name(input)}: {len(numbers):,} of {count:,} lines, evenly spaced ({', '.join(some)}); "
        f"--lines {count} takes all"
    )


def _renumber(report: "ParityReport", numbers: list[int]) -> None:
    """Makes differences name lines of the file and not of the sample; built-in sentences come after its lines."""
    for found in report.checks:
        found.tally.differences[:] = [
            replace(one, line=numbers[one.line - 1]) if one.line <= len(numbers) else one
            for one in found.tally.differences
        ]
