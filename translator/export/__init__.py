"""Checkpoints for other toolkits, and packed: one file a format, registered in `FORMATS`.

A format prepares a checkpoint, which raises `UserError` for what the other toolkit can't express, and gives a function
that saves it into an empty folder. `export_checkpoint` puts that folder in place, whole or not at all.
"""

from collections.abc import Callable
from pathlib import Path

from translator.checkpoint import Checkpoint, replaced_folder
from translator.engine.native.weights import AUTO
from translator.errors import UserError
from translator.export import to_ctranslate2, to_packed, to_transformers

Save = Callable[[Path], None]
"""Writes all files of an export into an existing folder."""

FORMATS: dict[str, Callable[[Checkpoint, str], Save]] = {
    "ctranslate2": to_ctranslate2.prepare,
    "packed": to_packed.prepare,
    "transformers": to_transformers.prepare,
}
"""Formats by the name that `translator export --to` gives."""


def check_export(to: str, output: Path) -> Path:
    """Where `output` leads; raises `UserError` for an unknown format, and unless it is new or an empty folder."""
    if to not in FORMATS:
        raise UserError(f"--to {to}: unknown format; known: {', '.join(FORMATS)}")
    try:
        # A symbolic link to an empty folder is followed; a rename would replace it.
        target = output.resolve()
        if output.is_dir():
            if any(output.iterdir()):
                raise UserError(f"{output}: holds something already; name a new or an empty folder")
        elif output.exists() or output.is_symlink():
            raise UserError(f"{output}: is not a folder; name a new or an empty one")
    except UserError:
        raise
    except (OSError, ValueError) as error:  # a zero byte in a name is a ValueError
        raise UserError(f"{output}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    return target


def export_checkpoint(checkpoint: Checkpoint, to: str, output: Path, compute_type: str = AUTO) -> None:
    """Writes `checkpoint` in the format `to` as the folder `output`, whole or not at all; packed as `compute_type`.

    Raises `UserError` as `check_export` does, for a model that the format can't hold, for a missing package, and when
    the folder can't be written.
    """
    target = check_export(to, output)
    save = FORMATS[to](checkpoint, compute_type)
    with replaced_folder(target) as folder:
        save(folder)
