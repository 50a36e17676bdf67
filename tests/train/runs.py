"""Runs of the copy task, looked at from outside and stopped from inside."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from train import loop
from train.run import run_recipe
from train.state import read_saved

WriteRecipe = Callable[..., Path]


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last saved step: averaged weights, weights, optimiser, random state."""
    return load_file(run / "last" / "model.safetensors") | load_file(run / "last" / "training.safetensors")


def records(run: Path) -> list[dict[str, Any]]:
    """The log, read by a JSON reader that knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def step_of(folder: Path) -> int:
    """The step a saved folder is of."""
    return read_saved(folder).counters.step


def figures(run: Path, *names: str) -> list[tuple[object, ...]]:
    return [tuple(record[name] for name in names) for record in records(run) if all(name in record for name in names)]


def same_run(first: Path, second: Path) -> None:
    """Bit for bit: tensors, counters but for the time, the log's losses and rates, the names of what is kept."""
    one, two = saved(first), saved(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    counters = [json.loads((run / "last" / "training.json").read_text())["counters"] for run in (first, second)]
    for values in counters:
        del values["seconds"], values["logged_seconds"]
    assert counters[0] == counters[1]
    for names in (("step", "loss", "learning_rate", "gradient_norm"), ("step", "dev_loss", "dev_bleu")):
        assert figures(first, *names) == figures(second, *names) != []
    names = [{path.name for path in run.iterdir() if not path.name.endswith("-log.jsonl")} for run in (first, second)]
    assert names[0] == names[1]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Sends this process a signal in the middle of a step, as a user or a scheduler would."""
    original = loop.Trainer._average

    def average(self: loop.Trainer) -> None:
        if self.counters.step == step:
            signal.raise_signal(number)
        original(self)

    monkeypatch.setattr(loop.Trainer, "_average", average)


def stopped(
    recipe: WriteRecipe, patch: pytest.MonkeyPatch, name: str, step: int = 10, settings: Sequence[str] = ()
) -> None:
    """A run of `name` that was stopped after `step`."""
    with patch.context() as context:
        stop_after(context, step, signal.SIGTERM)
        assert run_recipe(str(recipe(name)), list(settings)) is signal.SIGTERM
