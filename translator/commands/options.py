"""Options that several commands share, and what they stand for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from translator.bounds import MOST_ROWS, MOST_THREADS

if TYPE_CHECKING:
    from translator.config import DecodeConfig
    from translator.pipeline import Translator

CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Folder of a model, or of a run, for its best; by default the shipped model."),
]
InputOption = Annotated[Path | None, typer.Option("--input", help="UTF-8 text, a sentence or paragraph a line.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="File to write, whole or not at all.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads; by default PyTorch's.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
BeamOption = Annotated[
    int | None,
    typer.Option("--beam-size", min=1, max=MOST_ROWS, help="Beams; 1 is greedy. By default the checkpoint's setting."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one setting.")]


def load_translator(checkpoint: Path | None, device: str, threads: int | None) -> "Translator":
    """The checkpoint in folder `checkpoint`, or the shipped one, ready to translate; raises `UserError`."""
    from translator.pipeline import Translator

    set_threads(threads)
    return Translator.from_checkpoint(checkpoint, device=device)


def set_threads(threads: int | None) -> None:
    """Sets PyTorch's CPU threads; None leaves them."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def decode_config(
    translator: "Translator", beam_size: int | None, n_best: int, sample: bool, settings: list[str]
) -> "DecodeConfig":
    """The checkpoint's search settings with those of the command line; raises `UserError` for impossible ones."""
    from translator.config import apply_setting

    values: dict[str, Any] = {"n_best": n_best}
    if beam_size is not None:
        values["beam_size"] = beam_size
    if sample:
        values["sampling"] = True
    for setting in settings:
        apply_setting(values, setting)
    return translator.decode_config(None, **values)
