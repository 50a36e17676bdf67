"""`translator train`: a recipe to a trained model in a folder."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from train.backward import serve
from train.board import Board
from train.data import Data, load_data
from train.evaluate import score_sets
from train.fit import as_saved, fitted
from train.folder import TEST, RunFolder
from train.initial import initial_checkpoint, new_checkpoint, new_tokenizer
from train.loop import Trainer
from train.memory import keep_freed_memory
from train.processes import Processes, processes
from train.recipe import Recipe, read_recipe
from train.report import Report
from train.resume import Changes, changed_settings, described, judged_otherwise, text_changes
from train.state import Saved, read_saved
from translator.checkpoint import CONFIG, Checkpoint, CheckpointConfig, read_checkpoint
from translator.config import from_json, to_json
from translator.device import usable_device
from translator.errors import UserError
from translator.textio import atomic_write_bytes, json_text


def run_recipe(
    name: str,
    settings: list[str],
    *,
    data: Path | None = None,
    resume: bool = False,
    init_from: Path | None = None,
    device: str = "cpu",
) -> signal.Signals | None:
    """Trains what the recipe describes, into the folder it names; returns the signal that stopped it early, if one did.

    `data` is the folder that relative file names start from, where it isn't the recipe's own. `resume` goes on from the
    folder's last saved step; `init_from` starts from another checkpoint's weights and tokenizer. Raises `UserError` for
    a bad recipe, unusable text, a folder that holds something else or a run already, a training that diverges, a full
    disk.
    """
    recipe, base = read_recipe(name, settings, data)
    where = usable_device(device)
    keep_freed_memory()
    if resume and init_from is not None:
        raise UserError("--init-from: a resumed run goes on from its own weights; leave one of the two out")
    if init_from is not None:
        initial_checkpoint(init_from, recipe)  # before any text is read: a slip shows at once
    with processes(where) as group:
        if not group.leads:
            serve(group)
            return None
        with RunFolder(Path(recipe.output), resume=resume) as folder:
            report = Report(folder.path)
            if resume:
                trainer = _resumed(recipe, base, folder, report, group)
            else:
                trainer = _begun(recipe, base, folder, report, group, init_from)
            if trainer.settings.tensorboard:
                report.board = Board(folder.path, trainer.counters.step)
            with report:
                stopped_by = trainer.train()
            if stopped_by:
                step = trainer.counters.step
                report.record("stop", step, reason=stopped_by.name)
                report.say(f"stopped by {stopped_by.name} after step {step:,}; --resume goes on from there")
                return stopped_by
            _finish(folder, trainer, report)
    return None


def _begun(
    recipe: Recipe, base: Path, folder: RunFolder, report: Report, group: Processes, init_from: Path | None
) -> Trainer:
    """A run at step 0."""
    data = load_data(recipe, base, report.say)
    if init_from is not None:
        checkpoint = initial_checkpoint(init_from, recipe)
        report.say(f"fine-tuning the weights of {init_from}, with its tokenizer")
        recipe = fitted(recipe, data, checkpoint.tokenizer, new=False)
    else:
        tokenizer = new_tokenizer(recipe, data)
        recipe = fitted(recipe, data, tokenizer, new=True)
        checkpoint = new_checkpoint(recipe, tokenizer, report.say)
    report.expect(recipe.training.max_steps)
    torch.manual_seed(recipe.seed)
    trainer = Trainer(recipe, data, _decoding(checkpoint, recipe), folder, report, group)
    report.record("start", 0, **_facts(trainer), init_from=str(init_from) if init_from else None)
    if init_from is not None:
        trainer.validate()  # where it begins: only then can it be seen what the old text loses and the new one gains
    return trainer


def _resumed(recipe: Recipe, base: Path, folder: RunFolder, report: Report, group: Processes) -> Trainer:
    """The run in `folder`, at its last saved step, with what may change as `recipe` has it."""
    saved = read_saved(folder.last)
    counters = dataclasses.replace(saved.counters)
    recipe = as_saved(recipe, saved.recipe)
    report.expect(recipe.training.max_steps)
    changes = changed_settings(saved.recipe, recipe, counters.step, folder.last)
    data = load_data(recipe, base, report.say)
    _same_text(folder, saved, data, changes)
    checkpoint = _decoding(read_checkpoint(folder.last), recipe)
    trainer = Trainer(recipe, data, checkpoint, folder, report, group)
    trainer.resume(counters)  # from here on nothing may draw a random number: the first step's dropout comes next
    report.resume(counters.step)
    report.say(f"resumed after step {counters.step:,}")
    if changes:
        report.say(f"changed: {described(changes)}")
    metric, reason = recipe.evaluation.metric, ""
    if counters.best is not None and (counters.best_metric != metric or judged_otherwise(changes, metric)):
        reason = f"the {metric} of this recipe can't be compared with its {counters.best_metric}"
    elif counters.best is not None and not folder.best.exists() and counters.best_step != counters.step:
        reason = f"{folder.best} is gone"
    if reason:
        report.say(f"best starts anew, it was step {counters.best_step:,}: {reason}")
        counters.best, counters.best_metric, counters.stale_validations = None, None, 0
    _settle_best(folder, counters.step, counters.best_step, checkpoint)
    report.record("resume", counters.step, changes={key: list(pair) for key, pair in changes.items()},
                  **_facts(trainer))  # fmt: skip
    return trainer


def _same_text(folder: RunFolder, saved: Saved, data: Data, changes: Changes) -> None:
    if data.fingerprint() != saved.counters.fingerprint:
        why = text_changes(changes)
        raise UserError(
            f"{folder.last}: the training text has changed since this was saved"
            + (f" ({described(why)})" if why else "")
            + "; start a new run instead, with --init-from to go on from these weights"
        )


def _settle_best(folder: RunFolder, step: int, best_step: int, checkpoint: Checkpoint) -> None:
    """Brings `best` up to date after a kill between the two saves, and gives it the recipe's search settings."""
    if not folder.best.exists() or (best_step == step and read_saved(folder.best).counters.step != step):
        folder.keep_best()
    config = dataclasses.replace(from_json(CheckpointConfig, folder.best / CONFIG), decode=checkpoint.config.decode)
    atomic_write_bytes(folder.best / CONFIG, to_json(config).encode())


def _decoding(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with the recipe's search settings: those it is scored with are those it is saved with."""
    config = dataclasses.replace(checkpoint.config, decode=recipe.decode)
    return Checkpoint(checkpoint.model, checkpoint.tokenizer, config)


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What a log's first record says of a run: how it was set up, and where it runs."""
    recipe: dict[str, Any] = TypeAdapter(Recipe).dump_python(trainer.recipe, mode="json")
    return {
        "run": trainer.run.identity,
        "recipe": recipe,
        "model": dataclasses.asdict(trainer.averaged.config.model),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "pairs": len(trainer.pairs),
        "dev_sentences": len(trainer.data.dev.sources),
        "test_sentences": len(trainer.data.test.sources),
        "device": str(trainer.device),
        "threads": torch.get_num_threads(),
        "processes": trainer.backward.processes.count,
        "bfloat16": trainer.bfloat16,
        "torch": torch.__version__,
    }


def _finish(folder: RunFolder, trainer: Trainer, report: Report) -> None:
    """Scores the best checkpoint on the test part and says where everything is."""
    if trainer.data.test_sets:
        best = read_checkpoint(folder.best, trainer.device)
        result = score_sets(best, trainer.data.test_sets, best.config.decode)
        scores = result.scores
        figures = {
            **scores.figures(),
            "sentences": len(trainer.data.test.sources),
            "step": trainer.counters.best_step,
            "hours": round(trainer.counters.seconds / 3600, 2),
            "sets": result.figures(),
        }
        atomic_write_bytes(folder.path / TEST, (json_text(figures, indent=2) + "\n").encode())
        line = f"test: {result.line()}  ({next(iter(scores.values())).signature})"
        report.record("test", trainer.counters.step, line, **{f"test_{key}": value for key, value in figures.items()})
    report.say(f"done: {folder.best} holds the best model, {folder.last} the last")
