"""Which shipped model a pair of languages means."""

import subprocess
import sys
from pathlib import Path

import pytest

from translator import shipped
from translator.errors import UserError
from translator.shipped import check_languages, shipped_checkpoint


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("de-en", "en-zh", "zh-en"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((shipped.DEFAULT_CHECKPOINT / "config.json").read_text())
    (tmp_path / "en-fr").mkdir()  # no checkpoint in it
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "DEFAULT_CHECKPOINT", tmp_path / "en-zh")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        (None, None, "en-zh"),
        ("en", None, "en-zh"),
        ("zh", None, "zh-en"),
        (None, "en", "de-en"),
        ("zh-Hans", "en-GB", "zh-en"),
        (None, "zh-CN", "en-zh"),
    ],
)
def test_languages_choose_the_model(models: Path, source: str | None, target: str | None, name: str) -> None:
    assert shipped_checkpoint(source, target) == models / name


@pytest.mark.parametrize(("source", "target"), [("en", "fr"), ("zh", "de"), ("fr", None), ("en", "en")])
def test_a_pair_that_is_not_there_is_answered_with_those_that_are(
    models: Path, source: str, target: str | None
) -> None:
    with pytest.raises(UserError, match=rf"--from {source}.*en-zh, de-en, zh-en; train one"):
        shipped_checkpoint(source, target)


def test_a_checkpoint_of_other_languages_is_refused(models: Path) -> None:
    check_languages(models / "en-zh", "en-US", "zh")
    with pytest.raises(UserError, match=r"--to de: .*en-zh translates from en to zh"):
        check_languages(models / "en-zh", None, "de")


def test_on_the_command_line_it_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "translator", "translate", "--from", "en", "--to", "fr", "Hello."]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "--from en --to fr" in done.stderr and "en-zh" in done.stderr
