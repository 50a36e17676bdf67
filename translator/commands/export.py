"""`translator export`: a checkpoint for another toolkit."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import CheckpointOption

EXAMPLES = (
    "translator export --to ctranslate2 exported",
    "translator export --checkpoint checkpoints/mine/best --to transformers exported",
)


def run(
    output: Annotated[Path, typer.Argument(help="Folder to write, new or empty; whole or not at all.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Whose: ctranslate2, transformers, …; a wrong one is answered with those known.",
        ),
    ],
    checkpoint: CheckpointOption = None,
) -> None:
    """Write a checkpoint as CTranslate2 or Transformers load it: same weights, same tokens.

    The folder's README.md says how to load it. --to ctranslate2 needs the package ctranslate2.
    """
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.export import check_export, export_checkpoint

    check_export(to, output)  # before the time that reading takes
    export_checkpoint(read_checkpoint(checkpoint or DEFAULT_CHECKPOINT), to, output)
