"""A run's curves: read from its log, drawn, and refused in one line where there is nothing to draw."""

import json
import subprocess
import sys
from pathlib import Path

from train.curves import read_run

PLOT = [sys.executable, "-m", "translator", "plot"]


def log(folder: Path, steps: int = 4) -> Path:
    folder.mkdir()
    records = [{"event": "start", "step": 0, "recipe": {}}]
    for step in range(1, steps + 1):
        rate = {"learning_rate": step / 100, "tokens_per_second": 1000 * step}
        records.append({"event": "step", "step": step, "loss": 5.0 / step, **rate})
    if steps:
        scores = {"dev_loss": 1.5, "dev_bleu": 20.0, "dev_chrf": 30.0}
        records.append({"event": "validation", "step": steps, **scores})
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_points_are_those_of_the_log(tmp_path: Path) -> None:
    run = read_run(log(tmp_path / "a"))
    assert run.points("step", lambda record: record.get("loss")) == ([1, 2, 3, 4], [5.0, 2.5, 5 / 3, 1.25])
    assert run.points("validation", lambda record: record.get("dev_bleu")) == ([4], [20.0])
    assert run.points("step", lambda record: record.get("nothing")) == ([], [])


def test_the_picture_lies_in_the_run_or_where_it_is_asked_for(tmp_path: Path) -> None:
    runs = [str(log(tmp_path / name)) for name in "ab"]
    done = subprocess.run([*PLOT, runs[0]], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"{runs[0]}/curves.png", "")
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    both = tmp_path / "both.svg"
    done = subprocess.run([*PLOT, *runs, "--output", str(both)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "<svg" in both.read_text() and not (tmp_path / "b" / "curves.png").exists()


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    empty, run = log(tmp_path / "empty", steps=0), log(tmp_path / "run")
    for arguments, said in (
        ([str(tmp_path)], "not the folder of a training run"),
        ([str(empty)], "no step is logged yet"),
        ([str(run), "--output", str(tmp_path / "a.txt")], "ends in one of"),
    ):
        done = subprocess.run([*PLOT, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and done.stderr.count("\n") == 1
