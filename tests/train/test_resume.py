"""What a resumed run takes up, what it refuses, and that a damaged training state is one line."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.copy_task import write_copy_task
from tests.train.runs import WriteRecipe, records, step_of, stopped
from train import run
from train.run import run_recipe
from translator.checkpoint import read_checkpoint
from translator.errors import UserError


@pytest.mark.parametrize(
    ("setting", "key", "old", "new"),
    [
        ("training.batch_tokens=4096", "training.batch_tokens", "256", "4096"),
        ("seed=2", "seed", "1", "2"),
        ("training.learning_rate=0.5", "training.learning_rate", "0.003", "0.5"),
        ("training.accumulate=2", "training.accumulate", "1", "2"),
        ("training.adam_betas=[0.8, 0.9]", "training.adam_betas", "[0.9, 0.98]", "[0.8, 0.9]"),
        ("training.schedule=linear", "training.schedule", "'cosine'", "'linear'"),
        ("training.max_tokens=32", "training.max_tokens", "64", "32"),
        ("model.d_model=64", "model.d_model", "32", "64"),
        ("model.dropout=0.3", "model.dropout", "None", "0.3"),
        ("tokenizer.vocab_size=300", "tokenizer.vocab_size", "290", "300"),
        ("target_language=de", "target_language", "'en-x-copy'", "'de'"),
    ],
)
def test_what_cannot_change_is_refused_with_old_and_new_value(
    recipe: WriteRecipe, tmp_path: Path, setting: str, key: str, old: str, new: str
) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    with pytest.raises(UserError) as refusal:
        run_recipe(str(recipe()), ["training.max_steps=2", setting], resume=True)
    assert f"{key}: {old} → {new}" in str(refusal.value)
    assert "max_steps" not in str(refusal.value)  # that one may change
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    assert step_of(tmp_path / "run" / "last") == 1


def test_what_may_change_is_taken_up_said_and_recorded(
    recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_recipe(str(recipe()), ["training.max_steps=4"])
    settings = ["training.max_steps=9", "training.save_every=2", "evaluation.every=3", "training.log_every=2"]
    run_recipe(str(recipe()), settings, resume=True)
    said = capsys.readouterr().err
    assert "changed: evaluation.every: 10 → 3, training.log_every: 1 → 2, training.max_steps: 4 → 9" in said
    log = records(tmp_path / "run")
    assert [record["step"] for record in log if record["event"] == "validation"] == [4, 6, 9]
    resumed = next(record for record in log if record["event"] == "resume")
    assert resumed["changes"]["training.max_steps"] == [4, 9] and resumed["step"] == 4
    saved = json.loads((tmp_path / "run" / "last" / "training.json").read_text())
    assert saved["recipe"]["training"]["max_steps"] == saved["counters"]["step"] == 9


def test_fewer_steps_than_are_done_are_refused(recipe: WriteRecipe) -> None:
    run_recipe(str(recipe()), ["training.max_steps=4"])
    with pytest.raises(UserError, match="max_steps = 3: 4 steps are done"):
        run_recipe(str(recipe()), ["training.max_steps=3"], resume=True)


def test_the_same_text_from_another_place_is_taken_and_other_text_names_its_key(
    recipe: WriteRecipe, tmp_path: Path
) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    path = recipe()
    (tmp_path / "moved.src").write_bytes((tmp_path / "pairs.src").read_bytes())
    moved = 'corpora=[["moved.src", "pairs.tgt"]]'
    run_recipe(str(path), ["training.max_steps=2", moved], resume=True)
    assert step_of(tmp_path / "run" / "last") == 2
    with pytest.raises(UserError, match=r"text has changed .*filters.max_characters: 400 → 12"):
        run_recipe(str(path), ["training.max_steps=2", moved, "filters.max_characters=12"], resume=True)


@pytest.mark.parametrize("setting", ["evaluation.metric=loss", "evaluation.sentences=3", "decode.length_penalty=0.5"])
def test_best_starts_anew_where_its_values_cannot_be_compared(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    setting: str,
) -> None:  # fmt: skip
    stopped(recipe, monkeypatch, "run")
    path = tmp_path / "run" / "last" / "training.json"
    values = json.loads(path.read_text())
    assert values["counters"]["best_metric"] == "bleu"
    values["counters"]["best"] = 99.0  # a BLEU that nothing here will reach
    path.write_text(json.dumps(values))
    run_recipe(str(recipe()), [setting], resume=True)
    assert "best starts anew, it was step 10" in capsys.readouterr().err
    assert step_of(tmp_path / "run" / "best") == 20
    counters = json.loads(path.read_text())["counters"]
    assert counters["best_metric"] == ("loss" if "loss" in setting else "bleu") and counters["best"] < 99


def test_another_metric_of_the_same_kind_leaves_loss_comparable(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stopped(recipe, patch, "run", settings=["evaluation.metric=loss"])
    run_recipe(str(recipe()), ["evaluation.metric=loss", "evaluation.sentences=3"], resume=True)
    assert "anew" not in capsys.readouterr().err


def test_what_a_run_worked_out_still_holds_when_it_is_resumed(recipe: WriteRecipe, tmp_path: Path) -> None:
    auto = ["model.preset=auto", "tokenizer.vocab_size=auto", "training.warmup_steps=auto", "evaluation.every=auto"]
    run_recipe(str(recipe()), [*auto, "training.max_steps=10"])
    run_recipe(str(recipe()), [*auto, "training.max_steps=12"], resume=True)
    saved = json.loads((tmp_path / "run" / "last" / "training.json").read_text())["recipe"]
    assert saved["training"]["max_steps"] == 12 and saved["training"]["warmup_steps"] == 1
    assert saved["model"]["preset"] == "tiny" and saved["evaluation"]["every"] == 1
    assert saved["tokenizer"]["vocab_size"] > 261


def test_what_is_reported_is_what_is_saved(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    original = run.score_sets
    monkeypatch.setattr(run, "score_sets", lambda *given: used.append(given[2].beam_size) or original(*given))
    run_recipe(str(recipe("first")), ["training.max_steps=2", "decode.beam_size=3"])
    run_recipe(str(recipe("tuned")), ["training.max_steps=2", "decode.beam_size=1"], init_from=tmp_path / "first/best")
    run_recipe(str(recipe("first")), ["training.max_steps=2", "decode.beam_size=2"], resume=True)
    assert used == [3, 1, 2]
    for name, beams in (("tuned", 1), ("first", 2)):
        for place in ("best", "last"):
            assert read_checkpoint(tmp_path / name / place).config.decode.beam_size == beams


# -- a damaged training state ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of two steps, and its recipe; each test damages a copy."""
    folder = tmp_path_factory.mktemp("state")
    path = write_copy_task(folder)
    run_recipe(str(path), ["training.max_steps=2"])
    return folder / "run", path


def refused(a_run: tuple[Path, Path], run: Path) -> str:
    with pytest.raises(UserError) as refusal:
        run_recipe(str(a_run[1]), ["training.max_steps=3", f"output={run}"], resume=True)
    assert len(str(refusal.value)) < 1500
    return str(refusal.value)


@pytest.fixture
def copy(a_run: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(a_run[0], tmp_path / "copy"))


@pytest.mark.parametrize(
    "field, value",
    [
        ("step", -1), ("step", "2"), ("step", 2.0), ("step", True), ("step", 10**18), ("step", 1), ("step", None),
        ("epoch", 0), ("epoch", -3), ("epoch", 10**9), ("position", -1), ("position", 10**6), ("best_step", 9),
        ("seconds", math.nan), ("seconds", math.inf), ("seconds", -1.0), ("logged_loss", math.nan),
        ("logged_loss", 1e308), ("logged_steps", 10**12), ("logged_tokens", 10**12), ("best", math.inf),
        ("best", "high"), ("best_metric", "ter"), ("best_metric", None), ("stale_validations", -1),
        ("fingerprint", 5), ("fingerprint", "x" * 100_000), ("unknown", 1), ("target_tokens", [[[]]]),
    ],
)  # fmt: skip
def test_a_counter_that_cannot_be_is_one_line_with_its_name(
    a_run: tuple[Path, Path], copy: Path, field: str, value: Any
) -> None:
    path = copy / "last" / "training.json"
    values = json.loads(path.read_text())
    values["counters"][field] = value
    path.write_text(json.dumps(values))
    message = refused(a_run, copy)
    assert str(copy / "last") in message and (field in message or "not a JSON number" in message)


@pytest.mark.parametrize(
    ("key", "value"),
    [("training.max_steps", "auto"), ("training.max_steps", "x"), ("evaluation.every", -1), ("tokenizer.vocab_size", 5),
     ("training.adam_betas", [2, 3]), ("seed", 2**70), ("corpora", 5), ("training.speed", 1), ("decode.beam_size", 0)],
)  # fmt: skip
def test_a_saved_recipe_that_cannot_be_is_one_line_with_its_key(
    a_run: tuple[Path, Path], copy: Path, key: str, value: Any
) -> None:
    path = copy / "last" / "training.json"
    values = json.loads(path.read_text())
    *sections, last = ["recipe", *key.split(".")]
    place = values
    for section in sections:
        place = place[section]
    place[last] = value
    path.write_text(json.dumps(values))
    message = refused(a_run, copy)
    assert str(path) in message and f"recipe.{key}" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{}", b"{}", b'{"counters": {}}', b"[" * 100_000, b"9" * 10_000,
     b'{"run": "' + b"0" * 32 + b'", "format": 2, "counters": {}, "recipe": {}}'],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_a_training_json_that_is_none_is_one_line(a_run: tuple[Path, Path], copy: Path, content: bytes) -> None:
    (copy / "last" / "training.json").write_bytes(content)
    assert "training.json" in refused(a_run, copy)


@pytest.mark.parametrize(
    "name, to",
    [
        ("optimizer.0.exp_avg", lambda t: t[:1].clone()),
        ("optimizer.3.exp_avg_sq", lambda t: torch.zeros(2)),
        ("optimizer.1.exp_avg", lambda t: t.double()),
        ("optimizer.1.exp_avg", lambda t: t.half()),
        ("optimizer.1.exp_avg_sq", lambda t: t.to(torch.int32)),
        ("optimizer.1.exp_avg_sq", lambda t: t - 1),
        ("optimizer.2.exp_avg", lambda t: t * math.nan),
        ("optimizer.2.step", lambda t: t + 1),
        ("optimizer.2.step", lambda t: t.repeat(3)),
        ("optimizer.5.exp_avg", lambda t: None),
        ("optimizer.5.step", lambda t: None),
        ("model.embedding.weight", lambda t: t.T.contiguous()),
        ("model.embedding.weight", lambda t: t + math.inf),
        ("model.embedding.weight", lambda t: None),
        ("rng.cpu", lambda t: t.float()),
        ("rng.cpu", lambda t: t[:100].clone()),
        ("rng.cpu", lambda t: torch.full_like(t, 255)),
        ("rng.cpu", lambda t: None),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named_before_anything_is_loaded(
    a_run: tuple[Path, Path], copy: Path, name: str, to: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    path = copy / "last" / "training.safetensors"
    tensors = load_file(path)
    changed = to(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, path)
    message = refused(a_run, copy)
    assert "training.safetensors" in message and (name in message or "'rng'" in message)


@pytest.mark.parametrize("name", ["optimizer.99.exp_avg", "optimizer.x.y.z", "extra", "optimizer.0.max_exp_avg_sq"])
def test_an_unknown_tensor_is_named(a_run: tuple[Path, Path], copy: Path, name: str) -> None:
    path = copy / "last" / "training.safetensors"
    save_file(load_file(path) | {name: torch.zeros(1)}, path)
    assert f"{name!r} is unknown" in refused(a_run, copy)


def test_a_state_cut_short_or_larger_than_the_model_asks_for_is_one_line(a_run: tuple[Path, Path], copy: Path) -> None:
    path = copy / "last" / "training.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:7], whole[:5000], whole[:-1]):
        path.write_bytes(content)
        assert "not a whole safetensors file" in refused(a_run, copy)
    path.write_bytes(whole)
    os.truncate(path, 5 << 30)  # sparse: it costs nothing but to a reader
    assert "more than this model's state" in refused(a_run, copy)
    path.unlink()
    assert "training.safetensors" in refused(a_run, copy)


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[1]\n", b"[" * 50_000 + b"\n", b"{}\n", b"\0" * (1 << 25)])
def test_a_log_that_is_none_is_one_line(a_run: tuple[Path, Path], copy: Path, content: bytes) -> None:
    log = copy / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + content)
    assert f"log.jsonl: line {whole.count(10) + 1} is not a record" in refused(a_run, copy)
    assert log.read_bytes() == whole + content


def test_a_last_record_cut_off_by_a_kill_is_dropped(a_run: tuple[Path, Path], copy: Path) -> None:
    log = copy / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"event": "step", "st')
    run_recipe(str(a_run[1]), ["training.max_steps=3", f"output={copy}"], resume=True)
    assert [record["step"] for record in records(copy) if record["event"] == "step"] == [1, 2, 3]


def test_the_undamaged_copy_goes_on(a_run: tuple[Path, Path], copy: Path) -> None:
    run_recipe(str(a_run[1]), ["training.max_steps=3", f"output={copy}"], resume=True)
    assert step_of(copy / "last") == 3


@pytest.mark.slow
def test_files_damaged_at_random_are_refused_or_harmless_in_bounded_time_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.mutations", str(tmp_path), "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    refused, harmless = map(int, done.stdout.split())
    assert refused + harmless == 25 and refused > 12
