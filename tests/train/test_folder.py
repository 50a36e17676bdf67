"""A run's folder: nobody else's files are touched, nobody else writes, and it survives being copied."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runs import WriteRecipe, records, same_run, saved, step_of, stopped
from train.folder import RunFolder
from train.run import run_recipe
from translator.checkpoint import read_checkpoint
from translator.errors import UserError
from translator.pipeline import Translator


@pytest.mark.parametrize("name", ["step-by-step guide", "last", "best", ".last.old", ".best.unfinished", "log.jsonl"])
def test_a_folder_of_somebody_elses_is_refused_and_stays_as_it_was(
    recipe: WriteRecipe, tmp_path: Path, name: str
) -> None:
    theirs = tmp_path / "run" / name / "model.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="no run of this program"):
            run_recipe(str(recipe()), [], resume=resume)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [theirs]
    assert theirs.read_text() == "mine"


def test_an_empty_folder_is_taken_and_what_users_put_into_a_run_stays(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    stopped(recipe, monkeypatch, "run")
    (run / "step-00000003").mkdir()
    notes = [run / "step-00000003" / "notes.txt", run / "notes.txt", run / "best" / "README.md", run / "last" / "a.txt"]
    for path in notes:
        path.write_text("mine")
    run_recipe(str(recipe()), [], resume=True)
    assert step_of(run / "last") == 20
    assert [path.read_text() for path in notes] == ["mine"] * len(notes)


def test_what_a_kill_before_the_first_save_leaves_is_not_taken_for_the_new_run(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(str(recipe("other")), ["seed=2"])
    run_recipe(str(recipe("run")), ["training.max_steps=3"])
    for name in ("last", "best"):
        shutil.rmtree(tmp_path / "run" / name)
    half = tmp_path / "run" / ".last.unfinished"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    run_recipe(str(recipe("run")), ["seed=2"])
    (kept,) = (tmp_path / "run").glob("????????-log.jsonl")  # the figures of what was there
    assert '"seed": 1' in kept.read_text() and '"event": "test"' in kept.read_text()
    kept.with_name(kept.name.replace("log.jsonl", "test.json")).unlink()
    same_run(tmp_path / "run", tmp_path / "other")
    assert [record["event"] for record in records(tmp_path / "run")].count("start") == 1


def test_a_step_of_another_run_is_refused(recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "other"):
        stopped(recipe, monkeypatch, name)
    shutil.rmtree(tmp_path / "run" / "last")
    shutil.copytree(tmp_path / "other" / "last", tmp_path / "run" / "last")
    with pytest.raises(UserError, match=r"last/training.json: run = .* is another run's"):
        run_recipe(str(recipe()), [], resume=True)
    (tmp_path / "run" / "last").rename(tmp_path / "run" / ".last.new")
    with pytest.raises(UserError, match=r"training.json: run = .* is another run's"):
        run_recipe(str(recipe()), [])
    assert (tmp_path / "run" / ".last.new" / "model.safetensors").exists()


def test_two_trainings_cannot_have_one_folder_and_a_dead_one_lets_go(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom train.folder import RunFolder\n"
        f"held = RunFolder(Path({str(tmp_path / 'run')!r}), resume=True)\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        before = saved(tmp_path / "run")
        for resume in (False, True):
            with pytest.raises(UserError, match="another training is writing here"):
                run_recipe(str(recipe()), [], resume=resume)
        assert saved(tmp_path / "run").keys() == before.keys()
        process.kill()
    run_recipe(str(recipe()), ["training.max_steps=1"], resume=True)


def test_a_run_is_free_again_after_an_error(recipe: WriteRecipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size"):
        run_recipe(str(recipe()), ["tokenizer.vocab_size=9000"])
    with RunFolder(tmp_path / "run", resume=False):
        pass


def packed(run: Path, place: Path) -> None:
    archive = place.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in run.rglob("*"):
            if not path.name.startswith("."):
                file.write(path, path.relative_to(run))
    with zipfile.ZipFile(archive) as file:
        file.extractall(place)


def with_links_followed(run: Path, place: Path) -> None:
    subprocess.run(["cp", "-rL", run, place], check=True)


def moved(run: Path, place: Path) -> None:
    run.rename(place)


@pytest.mark.parametrize("way", [packed, with_links_followed, moved])
def test_a_run_goes_on_wherever_it_was_taken(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Path, Path], None]
) -> None:
    run_recipe(str(recipe("whole")), [])
    stopped(recipe, monkeypatch, "run", 13)
    way(tmp_path / "run", tmp_path / "copy")
    run_recipe(str(recipe("copy")), [], resume=True)
    same_run(tmp_path / "whole", tmp_path / "copy")
    assert step_of(tmp_path / "copy" / "best") == step_of(tmp_path / "whole" / "best")


def test_best_alone_is_a_checkpoint_anywhere(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe()), [])
    subprocess.run(["cp", "-r", tmp_path / "run" / "best", tmp_path / "elsewhere"], check=True)
    shutil.rmtree(tmp_path / "run")
    assert Translator.from_checkpoint(tmp_path / "elsewhere").translate(["red cat"])
    assert json.loads((tmp_path / "elsewhere" / "training.json").read_text())["counters"]["best_metric"] == "bleu"


def test_best_gone_is_said_and_starts_anew(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(recipe, monkeypatch, "run", 13)
    shutil.rmtree(tmp_path / "run" / "best")
    run_recipe(str(recipe()), [], resume=True)
    assert "best starts anew, it was step 10" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "run" / "best") and step_of(tmp_path / "run" / "best") == 20


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "empty folder"])
def test_a_last_that_is_no_saved_step_is_one_line(recipe: WriteRecipe, tmp_path: Path, kind: str) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    last = tmp_path / "run" / "last"
    assert (last / "model.safetensors").samefile(tmp_path / "run" / "best" / "model.safetensors")  # on the disk once
    last.rename(tmp_path / "elsewhere")
    if kind == "file":
        last.write_text("")
    elif kind == "empty folder":
        last.mkdir()
    else:
        last.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    with pytest.raises(UserError, match=r"run/last: .*(is a|is missing)"):
        run_recipe(str(recipe()), [], resume=True)
    with pytest.raises(UserError, match="holds a run already"):
        run_recipe(str(recipe()), [])
    assert (tmp_path / "elsewhere" / "training.json").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff", b"[" * 50_000, b'{"run": 5, "began": ""}', b'{"run": "..", "began": ""}'],
)
def test_an_identity_that_is_none_is_one_line(recipe: WriteRecipe, tmp_path: Path, content: bytes) -> None:
    run_recipe(str(recipe()), ["training.max_steps=1"])
    (tmp_path / "run" / "run.json").write_bytes(content)
    for resume in (False, True):
        with pytest.raises(UserError, match=r"run\.json: "):
            run_recipe(str(recipe()), [], resume=resume)
    assert step_of(tmp_path / "run" / "last") == 1
