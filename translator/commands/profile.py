"""`translator profile`: what each token costs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from translator.bounds import MOST_POSITIONS, MOST_REPEATS, MOST_ROWS, MOST_TIMED_ROWS
from translator.commands.options import CheckpointOption, DeviceOption, ThreadsOption
from translator.console import check_outputs, is_standard_stream, progress_bar, show, write_bytes
from translator.errors import UserError

EXAMPLES = (
    "translator profile --threads 1",
    "translator profile --preset xianyan --tokens 28 --plot cost.png --json cost.json",
)


def run(
    checkpoint: CheckpointOption = None,
    preset: Annotated[str | None, typer.Option(help="Random weights of a preset (xianyan, small) instead.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM", help="A kind of cache, none (no cache) or torch (nn.TransformerDecoder); repeatable."
        ),
    ] = None,
    source_length: Annotated[int, typer.Option(min=1, max=MOST_POSITIONS, help="Source tokens.")] = 40,
    tokens: Annotated[int, typer.Option(min=1, max=MOST_POSITIONS, help="Target tokens.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Sentences side by side.")] = 1,
    beams: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Rows a sentence.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, max=MOST_REPEATS, help="Timed passes of each arm.")] = 5,
    plot: Annotated[
        Path | None, typer.Option(help="Draw milliseconds a token into this .png, .pdf or .svg; - is standard output.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every figure here; - is standard output.")] = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Milliseconds a token, by position, with each cache and without: median and p95, first token apart.

    When --plot or --json go to standard output, the table goes to standard error.
    """
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.config import parse
    from translator.config import preset as named_preset
    from translator.device import usable_device
    from translator.diagnostics.latency import plot as picture
    from translator.diagnostics.latency.arms import LatencySettings
    from translator.diagnostics.latency.profile import profile_latency
    from translator.diagnostics.latency.report import latency_table
    from translator.model import TranslationModel
    from translator.textio import json_text

    if preset and checkpoint:
        raise UserError("--preset: random weights or a --checkpoint, not both")
    if batch * beams > MOST_TIMED_ROWS:
        raise UserError(f"--batch times --beams: {batch * beams:,} rows are too many; at most {MOST_TIMED_ROWS:,}")
    check_outputs(plot=plot, json=json_)
    if plot:
        picture.picture_format(plot)
    wanted: dict[str, Any] = {
        "source_length": source_length,
        "tokens": tokens,
        "batch": batch,
        "beams": beams,
        "dtype": dtype,
        "repeats": repeats,
        "threads": threads,
        "device": device,
    }
    if arm:
        wanted["arms"] = tuple(arm)
    settings = parse(LatencySettings, wanted, where="profile")
    usable_device(device)
    if preset:
        length = max(source_length, tokens)
        model = TranslationModel(named_preset(preset, 16_000, max_positions=max(length, 256)))
    else:
        model = read_checkpoint(checkpoint or DEFAULT_CHECKPOINT).model
    with progress_bar("timing, passes") as advance:
        report = profile_latency(model, settings, advance)
    show(latency_table(report), [], aside=is_standard_stream(plot) or is_standard_stream(json_))
    if plot:
        picture.plot(report, plot)
    if json_:
        write_bytes(json_, (json_text(report.to_json(), indent=2) + "\n").encode())
