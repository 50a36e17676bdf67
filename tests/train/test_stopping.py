"""How a run ends before its last step: numbers that are none, signals, a full disk, a kill at any moment."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tests.train.runs import WriteRecipe, records, same_run, saved, step_of, stop_after
from train import loop
from train.backward import Backward
from train.batches import Batch
from train.report import LOG, Report, duration
from train.run import run_recipe
from translator.errors import UserError

COMMAND = [sys.executable, "-m", "translator", "train"]


def poison(monkeypatch: pytest.MonkeyPatch, step: int, what: str) -> None:
    """From step `step` on, the loss or a gradient isn't a finite number."""
    original, steps = Backward.run, itertools.count(1)

    def run(self: Backward, batches: Sequence[Batch], tokens: int) -> float:
        loss = original(self, batches, tokens)
        bad = next(steps) >= step
        if bad and what == "the gradient":
            self.parameters[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        return float("nan") if bad and what == "the loss" else loss

    monkeypatch.setattr(Backward, "run", run)


@pytest.mark.parametrize("what", ["the loss", "the gradient"])
def test_the_first_number_that_is_none_stops_the_run_and_the_last_good_step_stays(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run_recipe(str(recipe("whole")), [])
    with monkeypatch.context() as patch:
        poison(patch, 13, what)
        with pytest.raises(UserError, match=rf"^step 13: {what} is (nan|inf), .*training.learning_rate than 0.003"):
            run_recipe(str(recipe("broken")), [])
    run = tmp_path / "broken"
    assert step_of(run / "last") == step_of(run / "best") == 10
    assert all(torch.isfinite(tensor).all() for tensor in saved(run).values())
    assert records(run)[-1] | {"time": ""} == {
        "event": "stop", "step": 13, "time": "", "reason": f"{what} is not finite"
    }  # fmt: skip
    run_recipe(str(recipe("broken")), [], resume=True)  # what was kept is good
    same_run(tmp_path / "whole", run)


def test_before_anything_was_saved_it_says_so(recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 2, "the loss")
    with pytest.raises(UserError, match=r"step 2: .*no step was saved before"):
        run_recipe(str(recipe()), [])


def test_weights_that_overflow_in_the_last_step_are_not_saved(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.Trainer._average

    def overflow(self: loop.Trainer) -> None:
        if self.counters.step == 20:
            self.averaged.model.embedding.weight.data[5, 5] = float("inf")
        original(self)

    monkeypatch.setattr(loop.Trainer, "_average", overflow)
    with pytest.raises(UserError, match=r"step 20: the weight 'embedding.weight' is nan"):
        run_recipe(str(recipe()), [])
    assert step_of(tmp_path / "run" / "last") == 15


@pytest.mark.slow
def test_a_rate_far_too_high_ends_the_command_in_one_line_with_status_2(recipe: WriteRecipe, tmp_path: Path) -> None:
    settings = ["training.learning_rate=100", "training.weight_decay=1", "training.schedule=constant"]
    command = [*COMMAND, str(recipe()), *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "training.learning_rate" in done.stderr.splitlines()[-1]
    assert records(tmp_path / "run")[-1]["event"] == "stop"


# -- signals ---------------------------------------------------------------------------------------------------------


def test_nohup_is_respected_and_a_second_ctrl_c_ends_at_once(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            stop_after(patch, 3, signal.SIGHUP)
            assert run_recipe(str(recipe("ignoring")), ["training.max_steps=5"]) is None
    finally:
        signal.signal(signal.SIGHUP, before)
    monkeypatch.setattr(loop, "_AGAIN", -1.0)
    original = loop.Trainer._average

    def average(self: loop.Trainer) -> None:
        original(self)
        if self.counters.step == 7:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop.Trainer, "_average", average)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(str(recipe("hasty")), [])
    assert step_of(tmp_path / "hasty" / "last") == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("numbers", [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)])
def test_signals_that_come_twice_as_shells_and_schedulers_send_them_save_once(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[signal.Signals, ...]
) -> None:
    monkeypatch.setattr(loop, "_AGAIN", -1.0)
    original = loop.Trainer._average

    def average(self: loop.Trainer) -> None:
        original(self)
        if self.counters.step == 7:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(loop.Trainer, "_average", average)
    assert run_recipe(str(recipe()), []) is numbers[0]
    assert step_of(tmp_path / "run" / "last") == 7
    assert records(tmp_path / "run")[-1]["reason"] == numbers[0].name


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_first(recipe: WriteRecipe, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, str(recipe()), "--set", "training.max_steps=100000"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.set_blocking(ours, False)
    last = tmp_path / "run" / "last"
    deadline = time.monotonic() + 60
    while not last.exists():
        assert process.poll() is None and time.monotonic() < deadline
        try:
            os.read(ours, 1 << 16)  # else the terminal is full and the run waits
        except BlockingIOError:
            time.sleep(0.01)
    os.close(ours)  # from here on, writing to the terminal fails
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 128 + signal.SIGHUP
    stopped = records(tmp_path / "run")[-1]
    assert (stopped["event"], stopped["reason"]) == ("stop", "SIGHUP")
    assert stopped["step"] == step_of(last)


def test_a_log_on_a_full_disk_is_one_line_and_the_run_can_go_on(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(str(recipe("whole")), [])
    log = tmp_path / "broken" / LOG
    original = loop.Trainer._average

    def average(self: loop.Trainer) -> None:
        original(self)
        if self.counters.step == 7:
            log.rename(tmp_path / "kept")
            log.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_average", average)
        with pytest.raises(UserError, match=r"log.jsonl: cannot be written: No space left on device"):
            run_recipe(str(recipe("broken")), [])
    (tmp_path / "kept").replace(log)
    assert step_of(tmp_path / "broken" / "last") == 5
    run_recipe(str(recipe("broken")), [], resume=True)
    same_run(tmp_path / "whole", tmp_path / "broken")


# -- what is told ----------------------------------------------------------------------------------------------------


def test_times_left_are_never_nothing() -> None:
    told = [duration(seconds) for seconds in (0.0, 29.4, 59.4, 59.9, 100, 3599, 3600, 46_800, 180_000)]
    assert told == ["1 s", "29 s", "59 s", "1 min", "2 min", "1 h 00 min", "1 h 00 min", "13 h 00 min", "2 d 2 h"]


def test_a_first_estimate_comes_after_seconds_and_then_a_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("train.report.time.monotonic", lambda: now[0])
    report = Report(tmp_path)
    report.expect(10_000)
    with report:
        for second in range(130):
            now[0] = 1000.0 + second
            report.advance(second + 1, "", f"second {second}")
            if second == 100:
                report.heard()  # a line of the log
    assert capsys.readouterr().err.split("\n")[:-1] == ["second 3", "second 63"]
    assert not (tmp_path / LOG).exists()


def test_a_log_holds_the_settings_the_samples_and_the_time_of_day(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe()), [])
    log = records(tmp_path / "run")
    start, test = log[0], log[-1]
    assert start["recipe"]["training"]["batch_tokens"] == 256 and start["recipe"]["seed"] == 1
    assert start["model"]["d_model"] == 32 and start["threads"] == torch.get_num_threads()
    validation = next(record for record in log if record["event"] == "validation")
    assert [set(sample) for sample in validation["samples"]] == [{"source", "translation", "references"}]
    assert test["event"] == "test" and test["test_step"] == step_of(tmp_path / "run" / "best")
    assert test["test_bleu"] == json.loads((tmp_path / "run" / "test.json").read_text())["bleu"]
    times = [datetime.fromisoformat(record["time"]) for record in log]
    assert times == sorted(times) and all(moment.tzinfo is not None for moment in times)
    epochs = [record["epoch"] for record in log if record["event"] == "step"]
    counters = json.loads((tmp_path / "run" / "last" / "training.json").read_text())["counters"]
    assert counters["epoch"] == 2  # the next batch's; so `first` batches make the first epoch
    first = 20 - counters["position"]
    assert epochs == [1] * first + [2] * (20 - first)


# -- a kill at any moment --------------------------------------------------------------------------------------------


def kills(*arguments: object) -> tuple[int, int]:
    """The last point of `tests.train.kills`, and how many it tried."""
    command = [sys.executable, "-m", "tests.train.kills", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last, tried = map(int, done.stdout.split())
    return last, tried


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", "full"])
def test_a_step_replaces_another_whole_wherever_it_is_cut_off_or_the_disk_is_full(tmp_path: Path, way: str) -> None:
    last, _ = kills(tmp_path, way)
    assert last >= 35


@pytest.mark.slow
def test_a_run_killed_before_any_of_its_file_operations_goes_on_to_the_bit(tmp_path: Path) -> None:
    first, stride = 3, 21  # all of them pass; that takes minutes
    last, tried = kills(tmp_path, first, stride)
    assert last >= 100  # a save alone has about thirty
    assert tried == (last - first) // stride + 1
