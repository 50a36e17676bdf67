"""The measures of scripts/check_typed.py and scripts/check_pathologies.py: what they take for right, and for wrong."""

import json
import random
import runpy
from pathlib import Path

import pytest

from .helpers import tiny_translator

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
TYPED = runpy.run_path(str(SCRIPTS / "check_typed.py"))
PATHOLOGIES = runpy.run_path(str(SCRIPTS / "check_pathologies.py"))


@pytest.mark.parametrize(
    ("kind", "line", "translation", "kept", "right"),
    [
        ("time", "It is 7:45.", "现在是7:45。", ["7:45"], True),
        ("time", "It is 7:45.", "现在是七点。", ["7:45"], False),
        ("time", "It is 7:45.", "现在是。 7:45", ["7:45"], False),
        ("emoji", "Happy birthday! 🎂", "生日快乐！🎂", ["🎂"], True),
        ("escape", "It is late.\\n", "晚了。\\n", ["\\n"], True),
        ("tag", "<b>Stop</b>", "<b>停</b>", ["<b>", "</b>"], True),
        ("tag", "<b>Stop</b>", "</b>停<b>", ["<b>", "</b>"], False),
        ("list", "1. A. 2. B.", "1. 甲。2. 乙。", ["1.", "2."], True),
        ("placeholder", "%s and %s", "%s和", ["%s", "%s"], False),
    ],
)
def test_what_counts_as_intact(kind: str, line: str, translation: str, kept: list[str], right: bool) -> None:
    assert TYPED["is_intact"](kind, line, translation, kept) is right


def test_each_variant_changes_what_it_says() -> None:
    text, draw = "“It's” 12 cats, isn't it?", random.Random(1)
    english = {name: make(text, draw) for name, make in TYPED["variants"](True).items()}
    assert english["capitals"] == "“IT'S” 12 CATS, ISN'T IT?"
    assert english["title"] == "“It's” 12 Cats, Isn't It?"
    assert english["no mark"] == text[:-1]
    assert english["quotes"] == "“It’s” 12 cats, isn’t it?"
    assert english["space before the mark"] == "“It's” 12 cats, isn't it ?"
    assert english["full width"].startswith("“Ｉｔ＇ｓ” １２")
    assert len(english["invisible"]) == len(text) + 3
    chinese = {name: make("“他”有12只猫，是吗？", draw) for name, make in TYPED["variants"](False).items()}
    assert chinese["half-width marks"] == "“他”有12只猫,是吗?"
    assert chinese["quotes"] == "「他」有12只猫，是吗？"
    assert "capitals" not in chinese


def test_targets_are_missed_where_figures_are_bad() -> None:
    figures = {
        "lines": {"spans": {"lines": 100, "right": 97}},
        "sentences": {"sentences": 9, "plain": {"chrf": 30.0}, "invisible": {"chrf": 30.0, "alike": 8},
                      "capitals": {"chrf": 27.9, "alike": 0}},
    }  # fmt: skip
    assert TYPED["verdict"](figures) == {
        "invisible: within 2": True, "capitals: within 2": False, "invisible: identical": False, "spans: 98%": False
    }  # fmt: skip


def test_pathologies_are_counted() -> None:
    lines = ["The cat sat on the mat.", "I would like a cup of tea, please.", "The the the the the cat.", "..."]
    figures = PATHOLOGIES["check"](tiny_translator(), lines, 0.01, {"beam_size": 1})
    assert figures["lines"] == 4
    assert figures["lengths"] == 4, "a hundred times the mean"
    assert not figures["reached"]
    assert json.dumps(figures)
    assert PATHOLOGIES["check"](tiny_translator(), [], 1.0, {})["reached"]
