"""The models that come with the program, by the languages they translate between."""

from pathlib import Path

from translator.checkpoint import CONFIG, DEFAULT_CHECKPOINT, CheckpointConfig
from translator.config import from_json
from translator.errors import UserError
from translator.languages import language

FOLDER = DEFAULT_CHECKPOINT.parent
SOURCE, TARGET = DEFAULT_CHECKPOINT.name.split("-")


def shipped() -> dict[str, Path]:
    """Folders of the shipped checkpoints by their name, source and target joined by a hyphen; the default first."""
    found = sorted(folder for folder in FOLDER.glob("*-*") if (folder / CONFIG).exists())
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder != DEFAULT_CHECKPOINT)}


def shipped_checkpoint(source: str | None = None, target: str | None = None) -> Path:
    """The shipped checkpoint from `source` to `target`, language codes; with one of them, the first that has it.

    Raises:
        UserError: a code is unknown, or there is no such pair; the message lists those there are.
    """
    if source is None and target is None:
        return DEFAULT_CHECKPOINT
    wanted = [None if code is None else language(code).primary for code in (source, target)]
    for name, folder in shipped().items():
        if all(code in (None, has) for code, has in zip(wanted, name.split("-"), strict=True)):
            return folder
    asked = " ".join(f"--{option} {code}" for option, code in (("from", source), ("to", target)) if code is not None)
    raise UserError(f"{asked}: no model for it comes with the program, which has {', '.join(shipped()) or 'none'}; "
                    "train one and name its folder with --checkpoint")  # fmt: skip


def check_languages(folder: Path, source: str | None, target: str | None) -> None:
    """Raises `UserError` where `folder` holds a checkpoint of other languages than those given."""
    if source is None and target is None:
        return
    config = from_json(CheckpointConfig, folder / CONFIG)
    for option, code, has in (("from", source, config.source_language), ("to", target, config.target_language)):
        if code is not None and language(code).primary != language(has).primary:
            raise UserError(f"--{option} {code}: {folder} translates from {config.source_language} to "
                            f"{config.target_language}")  # fmt: skip
