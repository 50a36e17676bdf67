"""A trained model made better at other text: mixed with the old, both scored, from before the first step on."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from train.data import load_data
from train.evaluate import SetScores, Validation
from train.recipe import read_recipe
from train.run import run_recipe
from translator.checkpoint import read_checkpoint
from translator.errors import UserError
from translator.metrics import Score, Scores

WriteRecipe = Callable[..., Path]
MIXED = """[
    { source = "pairs.src", target = "pairs.tgt", name = "old" },
    { table = "mine.tsv", name = "mine", repeat = 4 },
]"""


@pytest.fixture
def mixed(recipe: WriteRecipe, tmp_path: Path) -> WriteRecipe:
    """The copy task as the old text, fifty pairs of another as the new one, dev and test by the hash."""
    lines = [f"tuned{number % 7} red{number}\ttuned{number % 7} red{number}\n" for number in range(50)]
    (tmp_path / "mine.tsv").write_text("".join(lines), encoding="utf-8")

    def write(name: str) -> Path:
        replaced = {
            '[["pairs.src", "pairs.tgt"]]': MIXED,
            'dev = [["dev.src", "dev.tgt"]]': "",
            'test = [["dev.src", "dev.tgt"]]': "",
        }
        return recipe(name, **replaced)

    return write


def records(run: Path, kind: str) -> list[dict[str, object]]:
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def test_new_pairs_come_as_often_as_asked_and_never_from_dev(mixed: WriteRecipe, tmp_path: Path) -> None:
    said: list[str] = []
    data = load_data(*read_recipe(str(mixed("run"))), said.append)
    new = [pair for pair in data.train if pair.name == "mine"]
    assert len(new) == 4 * len({pair.source for pair in new}) and 4 * 40 <= len(new) <= 4 * 45
    assert {len(held.sources) >= 5 for held in data.dev_sets.values()} == {True}
    assert list(data.dev_sets) == ["old", "mine"]
    assert not {pair.source for pair in data.train} & set(data.dev.sources)
    assert any(line.startswith("mine: the hash makes ") for line in said)
    assert any(line.startswith("pairs repeated to") and "mine " in line for line in said)


@pytest.mark.parametrize(("old", "new", "times"), [(900, 10, 10), (90, 10, 1), (10, 90, 1), (9000, 1, 1000), (0, 5, 1)])
def test_auto_makes_the_new_text_a_tenth(recipe: WriteRecipe, tmp_path: Path, old: int, new: int, times: int) -> None:
    path = recipe(
        **{'[["pairs.src", "pairs.tgt"]]': '["old.tsv", { table = "new.tsv", repeat = "auto", name = "new" }]'}
    )
    for name, count in (("old", old), ("new", new)):
        text = "".join(f"{name} {number}\t{name} {number}\n" for number in range(count))
        (tmp_path / f"{name}.tsv").write_text(text, encoding="utf-8")
    data = load_data(*read_recipe(str(path)), lambda line: None)
    assert Counter(pair.name for pair in data.train) == Counter({"text": old, "new": new * times})


def test_both_scores_are_told_from_before_the_first_step_on(
    recipe: WriteRecipe, mixed: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_recipe(str(recipe("first")), ["training.max_steps=4"])
    capsys.readouterr()
    run_recipe(
        str(mixed("tuned")), ["training.max_steps=4", "evaluation.every=2"], init_from=tmp_path / "first" / "best"
    )
    validations = records(tmp_path / "tuned", "validation")
    assert [record["step"] for record in validations] == [0, 2, 4]
    for record in validations:
        assert set(record["dev_sets"]) == {"old", "mine"}  # type: ignore[call-overload]
    said = capsys.readouterr().err
    assert "(old BLEU " in said and "; mine BLEU " in said
    assert (
        read_checkpoint(tmp_path / "tuned" / "best").tokenizer.model
        == (tmp_path / "first" / "best" / "tokenizer.model").read_bytes()
    )


def test_best_is_by_the_mean_of_the_names() -> None:
    whole, old, mine = (Scores(bleu=Score(bleu, ""), chrf=Score(bleu / 2, "")) for bleu in (28.0, 30.0, 10.0))
    assert SetScores(whole, {}, []).metric("bleu") == 28
    result = SetScores(whole, {"old": old, "mine": mine}, [])
    assert (result.metric("bleu"), result.metric("chrf")) == (20, 10)
    assert Validation(1.5, result).metric("loss") == -1.5 and Validation(1.5, result).metric("bleu") == 20
    assert result.line() == "BLEU 28.0  chrF 14.0  (old BLEU 30.0 chrF 15.0; mine BLEU 10.0 chrF 5.0)"


def test_held_out_text_is_not_repeated(recipe: WriteRecipe) -> None:
    path = recipe(
        **{'dev = [["dev.src", "dev.tgt"]]': 'dev = [{ source = "dev.src", target = "dev.tgt", repeat = 2 }]'}
    )
    with pytest.raises(UserError, match="repeat is for training text"):
        load_data(*read_recipe(str(path)), lambda line: None)


def test_the_shipped_recipe_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"The fluxgate number {number} hums.\t第{number}号磁通门在响。\n" for number in range(50)]
    Path("mine.tsv").write_text("".join(lines), encoding="utf-8")
    data = load_data(*read_recipe("finetune"), lambda line: None)
    assert {name: len(held.sources) for name, held in data.dev_sets.items()} == {"mine": 5, "everyday": 937}
