"""What a recipe may say, and what is said about a slip in one."""

from pathlib import Path

import pytest

from train.data import load_data
from train.recipe import Recipe, read_recipe
from translator.errors import UserError

RECIPE = """
source_language = "en"
target_language = "zh"
output = "run"
corpora = ["mine.tsv"]
"""


def read(folder: Path, *settings: str, text: str = RECIPE) -> Recipe:
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return read_recipe(str(folder / "mine.toml"), list(settings))[0]


@pytest.mark.parametrize("side", ["source_language", "target_language"])
@pytest.mark.parametrize(("code", "near"), [("english", "'en'"), ("zht", "'zh'"), ("xx", "write e.g. en, zh")])
def test_an_unknown_language_is_refused_with_the_near_code(tmp_path: Path, side: str, code: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"mine\.toml: {side} = '{code}': unknown language code .*{near}"):
        read(tmp_path, f"{side}={code}")


def test_a_language_to_itself_is_a_slip_unless_the_variety_is_named(tmp_path: Path) -> None:
    for code in ("en", "EN", "eng"):
        with pytest.raises(UserError, match=r"are both 'en'; .* e\.g\. target_language = \"en-x-simple\""):
            read(tmp_path, f"target_language={code}")
    assert read(tmp_path, "target_language=en-GB").target_language == "en-GB"


@pytest.mark.parametrize("code", ["zh", "zho_Hans", "cmn", "zh_CN", "ZH"])
def test_every_spelling_of_chinese_is_filtered_and_simplified(tmp_path: Path, code: str) -> None:
    (tmp_path / "mine.tsv").write_text("Han\t漢語\nEnglish\tEnglish words\n", encoding="utf-8")
    said: list[str] = []
    data = load_data(read(tmp_path, f"target_language={code}"), tmp_path, said.append)
    assert [(pair.source, pair.target) for pair in data.train] == [("Han", "汉语")]
    assert any("not in Han script" in line and line.endswith(" 1") for line in said)


def test_traditional_chinese_asked_for_stays_traditional(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text("Han\t漢語\n", encoding="utf-8")
    data = load_data(read(tmp_path, "target_language=zh_TW"), tmp_path, lambda line: None)
    assert data.train[0].target == "漢語"
