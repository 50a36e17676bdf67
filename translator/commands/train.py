"""`translator train`: a translator from the text that a recipe names."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import DeviceOption, SetOption, ThreadsOption, set_threads
from translator.errors import UserError

EXAMPLES = (
    "translator train small",
    "translator train mine.toml --dry-run",
    "translator train mine.toml --set training.max_steps=2000 --init-from checkpoints/en-zh",
)


def run(
    recipe: Annotated[
        str, typer.Argument(help="A TOML recipe, a shipped one (small, finetune, en-zh …), or - for standard input.")
    ],
    set_: SetOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that the recipe's relative file names start from; by default its own.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last saved step.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to fine-tune on the recipe's text.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read, dropped, kept and trained; train nothing.")
    ] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Train a translator on the text a recipe names. Ctrl-C saves first; --resume goes on exactly from there."""
    set_threads(threads)
    if dry_run:
        from train.dry_run import dry_run as show

        if resume:
            raise UserError("--dry-run: shows how a new run would begin; leave out --resume")
        show(recipe, set_ or [], init_from, typer.echo, data)
        return
    from train.run import run_recipe

    stopped_by = run_recipe(recipe, set_ or [], data=data, resume=resume, init_from=init_from, device=device)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)
