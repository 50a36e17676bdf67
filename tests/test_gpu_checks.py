"""`scripts/gpu_checks`, small and on a CPU: all of it runs, and says what came of each section."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


def checks(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "gpu_checks"), *options]
    return subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_section_runs_on_a_cpu(tmp_path):
    written = tmp_path / "new" / "checks.json"
    done = checks("--device", "cpu", "--small", "--output", str(written), "--seconds", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(written.read_text(encoding="utf-8"))
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert list(report["sections"]) == list(verdicts)[1:]
    found = {name: section["found"] for name, section in report["sections"].items()}
    assert {section["verdict"] for section in report["sections"].values()} == {"done"}
    assert all(found[name] for name in found)
    assert found["engine_parity"]["graphs float32"]["best_token_equal"] == 1
    assert found["engine_parity"]["eager float32"]["max_difference"] < 1e-3
    assert set(found["latency"]) == {"xianyan", "base"}
    cached = found["latency"]["base"]
    assert {"cached, graphs float32", "cached, graphs not captured bfloat16", "uncached, bfloat16"} <= set(cached)
    assert list(found["bulk"]["graphs bfloat16, beam 4"]) == ["1", "2", "4"]
    assert found["translations"]["float32, beam 4"] == "3 of 3 lines the same"


def test_a_section_that_fails_or_takes_too_long_is_recorded_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("gpu_checks")
    written = tmp_path / "checks.json"

    def broken(setup, found):
        found["before"] = 1
        raise ValueError("no such thing\nand more")

    def endless(setup, found):
        seen.append(json.loads(written.read_text(encoding="utf-8"))["sections"])
        time.sleep(30)

    def fine(setup, found):
        found["kernels"] = 2

    seen: list[dict[str, object]] = []
    monkeypatch.setattr(module, "SECTIONS", {broken: 5, endless: 0.2, fine: 5})
    monkeypatch.setattr(sys, "argv", ["gpu_checks", "--device", "cpu", "--small", "--output", str(written)])
    assert module.main() == 1
    assert list(seen[0]) == ["broken"]
    sections = json.loads(written.read_text(encoding="utf-8"))["sections"]
    assert sections["broken"]["verdict"] == "ValueError: no such thing" and sections["broken"]["found"] == {"before": 1}
    assert sections["endless"]["verdict"].startswith("TimeoutError: stopped after")
    assert (sections["fine"]["verdict"], sections["fine"]["found"]) == ("done", {"kernels": 2})
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["fine"] == "done"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_without_a_gpu_it_says_so(tmp_path):
    done = checks("--device", "cuda", "--output", str(tmp_path / "checks.json"))
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout and not (tmp_path / "checks.json").exists()
