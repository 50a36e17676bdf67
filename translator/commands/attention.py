"""`translator attention`: which source token each target token read."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import CheckpointOption, FromOption, ToOption
from translator.console import write_bytes
from translator.errors import UserError

EXAMPLES = (
    "translator attention 'Where is the station?'",
    "translator attention 'Good morning.' --target 早上好。 --layer 3 --output reading.png",
)


def run(
    text: Annotated[str, typer.Argument(help="One sentence.")],
    target: Annotated[str | None, typer.Option(help="Its translation; by default the model's own.")] = None,
    layer: Annotated[int | None, typer.Option(min=1, help="Layer of the decoder; by default the mean of all.")] = None,
    head: Annotated[int | None, typer.Option(min=1, help="Head; by default the mean of all.")] = None,
    output: Annotated[Path | None, typer.Option(help="Draw a picture, .png, .svg or .pdf, instead.")] = None,
    checkpoint: CheckpointOption = None,
    from_: FromOption = None,
    to: ToOption = None,
) -> None:
    """Show which source token each token of a translation read: the decoder's cross-attention."""
    from translator.checkpoint import checkpoint_folder, read_checkpoint
    from translator.diagnostics.latency.plot import picture_format
    from translator.diagnostics.reading import in_terminal, picture, read_pair
    from translator.pipeline import Translator
    from translator.shipped import check_languages, shipped_checkpoint

    format = picture_format(output) if output is not None else ""
    if not text.strip():
        raise UserError("there is no text to read")
    if checkpoint is not None:
        check_languages(checkpoint_folder(checkpoint), from_, to)
    loaded = read_checkpoint(checkpoint or shipped_checkpoint(from_, to))
    if target is None:
        target = Translator(loaded).translate([text], split=False)[0]
    try:
        reading = read_pair(loaded, text, target)
        weights = reading.shown(layer, head)
    except ValueError as error:
        raise UserError(str(error)) from None
    if output is None:
        for line in in_terminal(reading, weights):
            typer.echo(line)
        return
    image, legend = picture(reading, weights, format)
    write_bytes(output, image)
    if legend:
        typer.echo(f"no font here has these characters: {', '.join(legend)}", err=True)
