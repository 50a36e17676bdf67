"""`translator score`: how likely the model finds given translations."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import (
    CheckpointOption,
    DeviceOption,
    InputOption,
    OutputOption,
    ThreadsOption,
    load_translator,
)
from translator.console import output_file
from translator.errors import UserError

EXAMPLES = (
    "translator score --input a.en --target a.zh",
    "translator translate --format jsonl --input a.en | translator score --candidates -",
)


def run(
    input: InputOption = None,
    target: Annotated[Path | None, typer.Option(help="Translations of --input, line by line.")] = None,
    candidates: Annotated[
        Path | None, typer.Option(help="JSON lines from translate; '-' is stdin. Scores the very tokens it found.")
    ] = None,
    checkpoint: CheckpointOption = None,
    output: OutputOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Teacher-forced log-probability of given translations: one line each, the log-probability and its tokens.

    With --candidates, one line for each candidate of each line, in order.
    """
    from translator.scoring import read_candidates, score_candidates, score_files

    if (candidates is None) == (input is None or target is None):
        raise UserError("--input and --target: give both, or --candidates alone")
    translator = load_translator(checkpoint, device, threads)
    if candidates is not None:
        results = score_candidates(translator, read_candidates(candidates))
    else:
        assert input is not None and target is not None
        results = score_files(translator, input, target)
    with output_file(output) as out:
        out.writelines(f"{log_prob:.6f}\t{tokens}\n" for log_prob, tokens in results)
