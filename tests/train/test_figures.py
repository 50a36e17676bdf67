"""Every figure of a training log's line, and of its record, is the one that its name says."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.loop import Trainer
from train.recipe import TrainingConfig
from train.report import LOG, Report
from train.state import Counters


def test_the_line_and_the_record_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counters = Counters(
        step=1200, epoch=3, position=7, target_tokens=654_321, seconds=321.04, logged_loss=8750.0, logged_tokens=2500,
        logged_steps=50, logged_seconds=12.5,
    )  # fmt: skip
    trainer = SimpleNamespace(
        counters=counters,
        settings=TrainingConfig(max_steps=3000, log_every=100),
        report=Report(tmp_path),
        _seconds_left=lambda: 450.0,
    )
    Trainer._tell(trainer, 3, 4.56e-4, 0.789)  # type: ignore[arg-type]
    # 8750 / 2500 = 3.5 a token; 2500 tokens in 12.5 s.
    line = "step 1,200/3,000  epoch 3  loss 3.500  rate 4.56e-04  200 tokens/s  8 min left"
    assert capsys.readouterr().err.splitlines() == [line]
    (record,) = [json.loads(text) for text in (tmp_path / LOG).read_text(encoding="utf-8").splitlines()]
    record.pop("time")
    assert record == {
        "event": "step",
        "step": 1200,
        "epoch": 3,
        "loss": 3.5,
        "learning_rate": 4.56e-4,
        "gradient_norm": 0.789,
        "tokens_per_second": 200,
        "target_tokens": 654_321,
        "seconds": 321.0,
    }
    assert (counters.logged_loss, counters.logged_tokens, counters.logged_steps, counters.logged_seconds) == (
        0,
        0,
        0,
        0,
    )
