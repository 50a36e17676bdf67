"""`translator plot`: the curves of training runs."""

from pathlib import Path
from typing import Annotated

import typer

from translator.console import write_bytes

EXAMPLES = ("translator plot checkpoints/small", "translator plot runs/a runs/b --output both.svg")


def run(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs; several are drawn over each other.")],
    output: Annotated[
        Path | None, typer.Option(help="Picture to write, .png, .svg or .pdf; by default RUN/curves.png.")
    ] = None,
) -> None:
    """Draw loss, BLEU and chrF, learning rate and tokens a second of training runs over their steps."""
    from train.curves import picture, read_run
    from translator.diagnostics.latency.plot import picture_format

    target = output or runs[0] / "curves.png"
    format = picture_format(target)
    write_bytes(target, picture([read_run(folder) for folder in runs], format))
    if output is None:
        typer.echo(f"{target}")
