"""`translator train`: a translator from the text that a recipe names."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import DeviceOption, SetOption, ThreadsOption, set_threads

EXAMPLES = (
    "translator train small",
    "translator train mine.toml --set training.max_steps=2000 --init-from checkpoints/default",
)


def run(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe, or the name of a shipped one (small).")],
    set_: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last saved step.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to fine-tune on the recipe's text.")] = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Train a translator on the text a recipe names. Ctrl-C saves first; --resume goes on exactly from there."""
    from train.run import run_recipe

    set_threads(threads)
    stopped_by = run_recipe(recipe, set_ or [], resume=resume, init_from=init_from, device=device)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)
