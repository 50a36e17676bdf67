"""Two processes under torchrun follow the run of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.runs import WriteRecipe, figures, records, saved
from train.run import run_recipe

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "translator"]


def torchrun(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*LAUNCH, *arguments], cwd=folder, capture_output=True, text=True, env=environment, timeout=100
    )


def without_key_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A bias on all keys changes no attention: its gradient is rounding alone, which Adam makes steps of."""
    return torch.cat(tensor.chunk(3)[::2]) if name.endswith("in_proj_bias") else tensor


@pytest.mark.slow
@pytest.mark.parametrize("isa", [None, "none"], ids=["fused", "plain"])
def test_two_processes_follow_the_curve_of_one(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str | None
) -> None:
    if isa is not None:
        monkeypatch.setenv("TRANSLATOR_ISA", isa)
    settings = ["model.dropout=0.0", "training.accumulate=2"]
    if isa is None:
        settings[0] = "model.dropout=0.3"  # what is dropped is decided before the batches are shared out
    run_recipe(str(recipe("one")), settings)
    done = torchrun(["train", str(recipe("two")), *(f"--set={setting}" for setting in settings)], tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.startswith("model.") or not name.startswith(("optimizer.", "rng.")):
            torch.testing.assert_close(
                without_key_bias(name, two[name]), without_key_bias(name, tensor), rtol=1e-4, atol=2e-6
            )
    for (step, loss), (other, found) in zip(
        figures(tmp_path / "one", "step", "loss"), figures(tmp_path / "two", "step", "loss"), strict=True
    ):
        assert step == other and loss == pytest.approx(found, abs=1e-5)
    assert [record["processes"] for record in records(tmp_path / "two") if record["event"] == "start"] == [2]
    assert done.stderr.count("done: ") == 1  # one of them speaks


@pytest.mark.slow
def test_an_error_of_the_leader_ends_all_of_them(recipe: WriteRecipe, tmp_path: Path) -> None:
    done = torchrun(["train", str(recipe("two")), "--set=corpora=['nothing.tsv']"], tmp_path)
    assert done.returncode != 0
    assert "nothing.tsv: " in done.stderr
