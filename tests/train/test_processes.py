"""Two processes under torchrun follow the run of one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.runs import WriteRecipe, figures, records, saved, step_of
from train.run import run_recipe
from translator.engine.native import library

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "translator"]


def environment(first: Path | None = None) -> dict[str, str]:
    """`first` is where Python looks for modules before anywhere else."""
    path = [str(first)] * (first is not None) + sys.path
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def torchrun(arguments: list[str], folder: Path, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *arguments], cwd=folder, capture_output=True, text=True, env=environment(first), timeout=100
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
    elif not library.available():
        pytest.skip("no native kernels")
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


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_all_of_them_in_one_line(recipe: WriteRecipe, tmp_path: Path) -> None:
    settings = ["training.learning_rate=100", "training.weight_decay=1", "training.schedule=constant"]
    done = torchrun(["train", str(recipe("two")), *(f"--set={setting}" for setting in settings)], tmp_path)
    assert done.returncode != 0
    assert "is not a finite number" in done.stderr
    assert "Connection" not in done.stderr  # the other one was told the end and lost nobody


@pytest.mark.slow
def test_a_failure_within_a_step_leaves_nobody_waiting(recipe: WriteRecipe, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '0':\n"
        "    from train.backward import Backward\n"
        "    def fail(*arguments):\n"
        "        raise MemoryError('no room')\n"
        "    Backward.share = fail\n"
    )
    began = time.monotonic()
    done = torchrun(["train", str(recipe("two"))], tmp_path, first=tmp_path)
    assert done.returncode != 0 and "no room" in done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_two_processes_are_stopped_by_a_signal_and_resumed(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe("two")
    running = subprocess.Popen(
        [*LAUNCH, "train", str(path), "--set=training.max_steps=100000"], cwd=tmp_path, env=environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "two" / "log.jsonl"
    while running.poll() is None and not (log.exists() and '"event": "step", "step": 3' in log.read_text()):
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)  # as a scheduler does, to the launcher, which passes it on
    _, said = running.communicate(timeout=60)
    assert running.returncode != 0 and "stopped by SIGTERM" in said
    at = step_of(tmp_path / "two" / "last")
    assert at >= 3
    again = torchrun(["train", str(path), "--resume", f"--set=training.max_steps={at + 2}"], tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"resumed after step {at}" in again.stderr and step_of(tmp_path / "two" / "last") == at + 2
