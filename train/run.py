"""`translator train`: a recipe to a trained model in a folder."""

import json
import signal
from pathlib import Path

import torch

from train.data import load_data
from train.initial import initial_checkpoint, new_checkpoint
from train.loop import Trainer, test_scores
from train.recipe import read_recipe
from train.report import Report
from translator.checkpoint import read_checkpoint
from translator.device import usable_device
from translator.errors import UserError
from translator.textio import atomic_write_bytes


def run_recipe(
    name: str,
    settings: list[str],
    *,
    resume: bool = False,
    init_from: Path | None = None,
    device: str = "cpu",
) -> signal.Signals | None:
    """Trains what the recipe describes, into the folder it names; returns the signal that stopped it early, if one did.

    `resume` goes on from the folder's last saved step; `init_from` starts from another checkpoint's weights and
    tokenizer. Raises `UserError` for a bad recipe, unusable text, a folder that already holds a run, a full disk.
    """
    recipe, base = read_recipe(name, settings)
    where = usable_device(device)
    folder = Path(recipe.output)
    if (folder / "last").exists() and not resume:
        raise UserError(f"{folder}: holds a run already; go on with --resume, or name another with --set output=…")
    if resume and not (folder / "last").exists():
        raise UserError(f"{folder}: nothing to resume, there is no saved step")
    if resume and init_from is not None:
        raise UserError("--init-from: a resumed run goes on from its own weights; leave one of the two out")
    if init_from is not None:
        initial_checkpoint(init_from, recipe)  # before any text is read: a slip shows at once
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from None
    report = Report(folder, recipe.training.max_steps)
    data = load_data(recipe, base, report.say)
    if resume:
        checkpoint = read_checkpoint(folder / "last")
    elif init_from is not None:
        checkpoint = initial_checkpoint(init_from, recipe)
        report.say(f"fine-tuning the weights of {init_from}, with its tokenizer")
    else:
        checkpoint = new_checkpoint(recipe, data, report)
    torch.manual_seed(recipe.seed)
    trainer = Trainer(recipe, data, checkpoint, folder, report, where)
    if resume:
        trainer.resume()
    with report:
        stopped_by = trainer.train()
    if stopped_by:
        report.say(f"stopped by {stopped_by.name} after step {trainer.counters.step:,}; --resume goes on from there")
        return stopped_by
    _finish(folder, trainer, report)
    return None


def _finish(folder: Path, trainer: Trainer, report: Report) -> None:
    """Scores the best checkpoint on the test part and says where everything is."""
    if trainer.data.test.sources:
        scores = test_scores(read_checkpoint(folder / "best", trainer.device), trainer.data, trainer.recipe)
        figures = {
            "bleu": scores.bleu,
            "chrf": scores.chrf,
            "bleu_signature": scores.bleu_signature,
            "chrf_signature": scores.chrf_signature,
            "sentences": len(trainer.data.test.sources),
            "step": trainer.counters.best_step,
            "hours": round(trainer.counters.seconds / 3600, 2),
        }
        atomic_write_bytes(folder / "test.json", (json.dumps(figures, indent=2) + "\n").encode())
        report.say(f"test: BLEU {scores.bleu:.1f}  chrF {scores.chrf:.1f}  ({scores.bleu_signature})")
    report.say(f"done: {folder / 'best'} holds the best model, {folder / 'last'} the last")
