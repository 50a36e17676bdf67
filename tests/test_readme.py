"""What the README shows works: its Python runs, its commands parse, the files it names are there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from train.recipe import read_recipe
from translator import cli
from translator.checkpoint import DEFAULT_CHECKPOINT
from translator.config import DecodeConfig, apply_setting, parse
from translator.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_MODEL = pytest.mark.skipif(not DEFAULT_CHECKPOINT.exists(), reason="no model is shipped in this checkout")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    parts = [part for line in lines for part in _pipeline(line)]
    return [part[1:] for part in parts if part[:1] == ["translator"]]


def _pipeline(line: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_ones_the_program_takes(words: list[str]) -> None:
    group = typer.main.get_command(cli.app)
    name, *arguments = words
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments)
    check_settings(name, context.params.get("set_") or [])


def check_settings(command: str, settings: list[str]) -> None:
    """Whether the recipe, or the search's settings, know these keys and allow their values."""
    if command == "train":
        read_recipe("small", settings)
        return
    values: dict[str, Any] = {}
    for setting in settings:
        apply_setting(values, setting)
    parse(DecodeConfig, values, where="--set")


@pytest.mark.parametrize(
    ("command", "setting"),
    [("train", "training.max_stepz=5000"), ("train", "training.max_steps=many"), ("translate", "beamsize=4")],
)
def test_a_misspelt_setting_would_be_noticed(command: str, setting: str) -> None:
    with pytest.raises(UserError):
        check_settings(command, [setting])


def test_there_are_settings_to_check() -> None:
    assert any("--set" in words for words in commands())


def test_there_are_commands_for_every_subcommand() -> None:
    group = typer.main.get_command(cli.app)
    assert {words[0] for words in commands()} == set(group.commands)  # type: ignore[attr-defined]


@NEEDS_MODEL
def test_python_runs() -> None:
    assert blocks("python")
    names: dict[str, object] = {}  # one for all: later blocks go on where earlier ones stopped
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)


def test_files_it_links_to_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    if not DEFAULT_CHECKPOINT.exists():
        missing = [link for link in missing if not link.startswith(("checkpoints/en-zh", "results/"))]
    assert missing == []


def test_the_two_commands_exist_and_may_be_run() -> None:
    for script in ("scripts/demo", "scripts/test"):
        assert script in README
        assert (ROOT / script).stat().st_mode & 0o111
