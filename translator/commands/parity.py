"""`translator parity`: the proof that a cache changes nothing."""

from pathlib import Path
from typing import Annotated

import typer

from translator.bounds import MOST_ROWS
from translator.commands.options import CheckpointOption, DeviceOption, ThreadsOption, set_threads
from translator.console import progress_bar, show
from translator.errors import UserError

EXAMPLES = (
    "translator parity",
    "translator parity --self-test",
    "translator parity --checkpoint checkpoints/mine/best --input dev.en",
)


def run(
    checkpoint: CheckpointOption = None,
    input: Annotated[Path | None, typer.Option(help="Sentences to check with; a few get company.")] = None,
    beam_size: Annotated[
        int, typer.Option("--beam-size", max=MOST_ROWS, help="Beams of the beam search compared; 3 or more.")
    ] = 4,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults and see whether the check catches each.")
    ] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Prove the cache: cached against uncached against PyTorch's own decoder, every logit, token and score.

    fp64 decides (1e-10), fp32 must agree to 1e-4, bf16 is reported. Exit status 1 on any fault. With --self-test, on a
    small random model, or on --checkpoint when one is given.
    """
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.device import usable_device
    from translator.diagnostics import parity as check
    from translator.diagnostics import self_test as trial
    from translator.textio import read_lines

    set_threads(threads)
    where = usable_device(device)
    if self_test and input:
        raise UserError("--input: --self-test has sentences of its own; leave one of the two out")
    passed: bool
    if self_test:
        model = read_checkpoint(checkpoint, where).model if checkpoint else None
        with progress_bar("planting faults") as progress:
            tested = trial.self_test(model, progress=progress)
        show(trial.self_test_table(tested), [*trial.self_test_notes(tested), trial.self_test_summary(tested)])
        passed = tested.passed
    else:
        lines = read_lines(input) if input else None
        with progress_bar("comparing") as progress:
            checked = check.check_parity(
                read_checkpoint(checkpoint or DEFAULT_CHECKPOINT, where), lines, beam_size=beam_size, progress=progress
            )
        show(check.report_table(checked), [*check.report_notes(checked), check.report_summary(checked)])
        passed = checked.passed
    if not passed:
        raise typer.Exit(1)
