"""`translator export`: a checkpoint for another toolkit, or packed."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import CheckpointOption, ComputeTypeOption

EXAMPLES = (
    "translator export --to ctranslate2 exported",
    "translator export --to packed --compute-type int8 packed",
    "translator export --checkpoint checkpoints/mine/best --to transformers exported",
)


def run(
    output: Annotated[Path, typer.Argument(help="Folder to write, new or empty; whole or not at all.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Whose: ctranslate2, transformers, or packed, …; a wrong one is answered with those known.",
        ),
    ],
    checkpoint: CheckpointOption = None,
    compute_type: ComputeTypeOption = "auto",
) -> None:
    """Write a checkpoint as CTranslate2 or Transformers load it, or packed: same weights, same tokens.

    The folder's README.md says how to load it. --to ctranslate2 needs the package ctranslate2.

    --to packed writes weights as the engine packed computes with them, for --checkpoint here: processes share them.
    """
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.export import check_export, export_checkpoint

    check_export(to, output)  # before the time that reading takes
    export_checkpoint(read_checkpoint(checkpoint or DEFAULT_CHECKPOINT), to, output, compute_type)
