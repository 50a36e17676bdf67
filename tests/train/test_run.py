"""A whole run: what it leaves behind, how it stops, and that resuming leaves no trace."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.runs import WriteRecipe, records, same_run, saved, step_of, stop_after
from train.run import run_recipe
from translator.checkpoint import read_checkpoint
from translator.errors import UserError
from translator.pipeline import Translator


def test_a_run_leaves_checkpoints_a_log_and_test_scores(recipe: WriteRecipe, tmp_path: Path) -> None:
    assert run_recipe(str(recipe()), []) is None
    run = tmp_path / "run"
    assert len(Translator.from_checkpoint(run / "best").translate(["red cat", ""])) == 2
    assert [(record["event"], record["step"]) for record in records(run)] == [
        ("start", 0),
        *(("step", step) for step in range(1, 11)),
        ("validation", 10),
        *(("step", step) for step in range(11, 21)),
        ("validation", 20),
        ("test", 20),
    ]
    assert "tok:13a" in json.loads((run / "test.json").read_text())["bleu_signature"]
    assert step_of(run / "last") == 20
    assert {path.name for path in run.iterdir()} == {"last", "best", "run.json", "log.jsonl", "test.json", ".lock"}
    assert not [path for path in run.rglob("*") if path.is_symlink()]
    assert not [path for path in run.rglob("*") if path.suffix in (".pt", ".pkl", ".bin", ".pth")]


@pytest.mark.parametrize(("step", "number"), [(7, signal.SIGTERM), (10, signal.SIGINT), (13, signal.SIGTERM)])
def test_a_signal_saves_first_and_resuming_is_exact(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals
) -> None:
    run_recipe(str(recipe("whole")), [])
    with monkeypatch.context() as patch:
        stop_after(patch, step, number)
        assert run_recipe(str(recipe("broken")), []) is number
    assert step_of(tmp_path / "broken" / "last") == step
    run_recipe(str(recipe("broken")), [], resume=True)
    same_run(tmp_path / "whole", tmp_path / "broken")


def test_resuming_is_exact_with_accumulation_sampling_and_dropout_in_the_middle_of_an_epoch(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["training.accumulate=3", "tokenizer.sampling_alpha=0.3", "model.dropout=0.3"]
    run_recipe(str(recipe("whole")), settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 7, signal.SIGTERM)
        run_recipe(str(recipe("broken")), settings)
    counters = json.loads((tmp_path / "broken" / "last" / "training.json").read_text())["counters"]
    assert counters["position"] > 0  # else this would not be the middle of an epoch
    run_recipe(str(recipe("broken")), settings, resume=True)
    same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow
def test_kill_9_after_a_checkpoint_and_resume_is_exact(recipe: WriteRecipe, tmp_path: Path) -> None:
    settings = ["training.max_steps=60", "tokenizer.sampling_alpha=0.3"]
    run_recipe(str(recipe("whole")), settings)
    command = [
        sys.executable,
        "-m",
        "translator",
        "train",
        str(recipe("broken")),
        *(part for one in settings for part in ("--set", one)),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    last = tmp_path / "broken" / "last"
    deadline = time.monotonic() + 120
    while not (last.exists() and (tmp_path / "broken" / "best").exists()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert step_of(last) < 60
    assert subprocess.run([*command, "--resume"], stderr=subprocess.DEVNULL).returncode == 0
    same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow
def test_sigterm_ends_the_command_with_the_usual_status(recipe: WriteRecipe, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "translator", "train", str(recipe()), "--set", "training.max_steps=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "last").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "--resume" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe()
    run_recipe(str(path), ["training.max_steps=5", "evaluation.every=5"])
    before = saved(tmp_path / "run")

    def little_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [sys.executable, "-m", "translator", "train", str(path), "--resume"],
        preexec_fn=little_disk,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "run").glob(".*")] == [".lock"]
    after = saved(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_with_a_run_is_not_overwritten(recipe: WriteRecipe) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    with pytest.raises(UserError, match="--resume"):
        run_recipe(str(recipe()), ["training.max_steps=1"])


def test_resuming_refuses_other_text_and_a_folder_without_a_run(recipe: WriteRecipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        run_recipe(str(recipe()), [], resume=True)
    run_recipe(str(recipe()), ["training.max_steps=1"])
    path = recipe()
    with (tmp_path / "pairs.src").open("a") as source, (tmp_path / "pairs.tgt").open("a") as target:
        source.write("new line\n")
        target.write("new line\n")
    with pytest.raises(UserError, match="text has changed"):
        run_recipe(str(path), [], resume=True)


def test_fine_tuning_starts_from_the_other_models_weights_and_tokenizer(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe("first")), [])
    first = read_checkpoint(tmp_path / "first" / "best")
    settings = ["training.max_steps=1", "training.learning_rate=1e-9", "tokenizer.vocab_size=280"]
    run_recipe(str(recipe("second")), settings, init_from=tmp_path / "first" / "best")
    second = read_checkpoint(tmp_path / "second" / "best")
    assert second.tokenizer.model == first.tokenizer.model
    for name, tensor in second.model.state_dict().items():
        torch.testing.assert_close(tensor, first.model.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "part"), [("target_language=de", "target_language is 'de'"), ("model.d_model=64", "model.d_model = 64")]
)
def test_fine_tuning_refuses_what_the_other_model_is_not(
    recipe: WriteRecipe, tmp_path: Path, setting: str, part: str
) -> None:
    run_recipe(str(recipe("first")), ["training.max_steps=1"])
    with pytest.raises(UserError, match=part):
        run_recipe(str(recipe("second")), [setting], init_from=tmp_path / "first" / "best")
    assert not (tmp_path / "second").exists()


def test_training_stops_when_nothing_improves(recipe: WriteRecipe, tmp_path: Path) -> None:
    settings = [
        "training.max_steps=200",
        "training.learning_rate=1e-12",
        "evaluation.every=2",
        "evaluation.patience=3",
        "evaluation.metric=bleu",
    ]
    run_recipe(str(recipe()), settings)
    assert step_of(tmp_path / "run" / "last") == 8
    assert step_of(tmp_path / "run" / "best") == 2


def test_text_too_small_for_a_dev_part_trains_without_validation(
    recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(**{'dev = [["dev.src", "dev.tgt"]]': "", 'test = [["dev.src", "dev.tgt"]]': ""})
    for side in ("src", "tgt"):
        lines = (tmp_path / f"pairs.{side}").read_text().splitlines()[:9]
        (tmp_path / f"pairs.{side}").write_text("\n".join(lines))
    run_recipe(str(path), ["tokenizer.vocab_size=auto", "training.max_steps=3"])
    assert "no dev sentences" in capsys.readouterr().err
    assert Translator.from_checkpoint(tmp_path / "run" / "best").translate(["red"])


def test_a_vocabulary_too_large_names_the_largest(recipe: WriteRecipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size = 9000 is too large .* from \d+ to \d+; leave it out"):
        run_recipe(str(recipe()), ["tokenizer.vocab_size=9000"])
    assert not (tmp_path / "run" / "last").exists()


def test_a_run_folder_that_cannot_be_made_is_one_line(recipe: WriteRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        run_recipe(str(recipe()), [f"output={tmp_path / 'file' / 'run'}"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe()), ["training.precision=auto"], device="cuda")
    assert (tmp_path / "run" / "best").exists()


assert os.name == "posix"  # signals and limits of this file
