"""`translator score`: how likely the model finds given translations."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import (
    BatchOption,
    CheckpointsOption,
    ComputeTypeOption,
    DeviceOption,
    EngineOption,
    ExactOption,
    FromOption,
    InputOption,
    OutputOption,
    ThreadsOption,
    ToOption,
    load_translator,
)
from translator.console import check_outputs, one_standard_input, output_file, progress_bar
from translator.errors import UserError

EXAMPLES = (
    "translator score --input a.en --target a.zh",
    "translator translate --format jsonl --input a.en | translator score --candidates -",
)


def run(
    input: InputOption = None,
    target: Annotated[
        Path | None, typer.Option(help="Translations of --input, line by line; - as for --input.")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(help="JSON lines from translate; - is standard input. Scores the very tokens it found."),
    ] = None,
    checkpoint: CheckpointsOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    output: OutputOption = None,
    batch_tokens: BatchOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    compute_type: ComputeTypeOption = "auto",
    exact: ExactOption = False,
) -> None:
    """Teacher-forced log-probability of given translations: one line each, the log-probability and its tokens.

    With --candidates, one line for each candidate of each line, in order.
    """
    from translator.scoring import read_candidates, score_candidates, score_files

    one_standard_input(input=input, target=target, candidates=candidates)
    files = [path for path in (input, target) if path is not None]
    if len(files) != (0 if candidates else 2):
        raise UserError("--input and --target: give both, or --candidates alone")
    check_outputs(output=output)
    translator = load_translator(
        checkpoint,
        device,
        threads,
        batch_tokens,
        engine=engine,
        compute_type=compute_type,
        exact=exact,
        languages=(from_, to),
    )
    with progress_bar("scoring") as advance:
        if candidates is not None:
            results = score_candidates(translator, read_candidates(candidates), advance)
        else:
            results = score_files(translator, files[0], files[1], advance)
    with output_file(output) as out:
        out.writelines(f"{log_prob:.6f}\t{tokens}\n" for log_prob, tokens in results)
