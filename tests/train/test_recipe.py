"""What a recipe may say, and what is said about a slip in one."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import TypeAdapter

from tests.copy_task import sentences
from train.data import load_data
from train.fit import as_saved, fitted
from train.initial import new_tokenizer
from train.recipe import RECIPES, Recipe, TrainingConfig, read_recipe
from translator.attention import STRUCTURES, CachedMultiheadAttention
from translator.config import STRICT, ModelConfig, from_json, parse, preset, to_json
from translator.errors import UserError
from translator.model import TranslationModel

SECTIONS = ("split", "filters", "tokenizer", "model", "training", "evaluation", "decode")
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


# Slips


def test_all_unknown_keys_are_named_at_once_with_what_is_valid(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, "training.max_stepz=5", "max_steps=5", "d_modle=64", "xyzzy=1", "splitt.key=source")
    said = str(caught.value)
    assert "unknown keys " in said and "'xyzzy'" in said
    assert "'training.max_stepz'; did you mean 'max_steps'?" in said
    assert "'max_steps'; did you mean 'training.max_steps'?" in said
    assert "'d_modle'; did you mean 'model.d_model'?" in said
    assert "'splitt'; did you mean 'split'?" in said
    assert "[training] knows: max_steps, batch_tokens, " in said
    assert "known: source_language, target_language, " in said


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"seed={2**63}", f"seed = {2**63}: "),
        ("seed=-1", "seed = -1: "),
        ("training.adam_betas=[2, 3]", "training.adam_betas.0 = 2: "),
        ("training.adam_betas=[0.9, 1.0]", r"training.adam_betas.1 = 1.0: "),
        ("training.adam_betas=[0.9]", "training.adam_betas.1"),
        ("training.learning_rate=101", "training.learning_rate = 101: "),
        ("training.learning_rate=0", "training.learning_rate = 0: "),
        ("training.learning_rate=nan", "training.learning_rate = nan: "),
        ("training.weight_decay=2", "training.weight_decay = 2: "),
        ("training.clip_norm=inf", "training.clip_norm = inf: "),
        (f"training.max_steps={10**9}", f"training.max_steps = {10**9}: "),
        ("training.max_steps=0", "training.max_steps = 0: "),
        ("training.max_steps=-1", "training.max_steps = -1: "),
        ("training.max_steps=many", "training.max_steps = 'many': "),
        (f"training.batch_tokens={10**12}", "training.batch_tokens = "),
        (f"training.accumulate={10**12}", "training.accumulate = "),
        (f"training.max_tokens={10**9}", "training.max_tokens = "),
        (f"evaluation.sentences={10**12}", "evaluation.sentences = "),
        (f"evaluation.beam_size={10**6}", "evaluation.beam_size = "),
        (f"tokenizer.vocab_size={10**9}", "tokenizer.vocab_size = "),
        ("tokenizer.vocab_size=260", "tokenizer.vocab_size = 260: "),
        ("tokenizer.sampling_alpha=1.5", "tokenizer.sampling_alpha = 1.5: "),
        (f"model.d_model={10**9}", f"d_model = {10**9}: "),
        ("model.d_model=30", "d_model 30 must be a multiple of nhead 4"),
        ("model.dropout=1", "dropout = 1"),
        ("model.preset=smal", "preset 'smal' is unknown; known: auto, small, tiny, xianyan"),
        (f"filters.max_characters={10**12}", "filters.max_characters = "),
        ('output="a\\u0000b"', "it holds a NUL"),
        (f"output={'x' * 300}", "it is longer than 255 bytes"),
        (f"output={'字' * 100}", "it is longer than 255 bytes"),
        ("output=", "the name of a file or folder is missing"),
        (f"seed={'9' * 5000}", "seed = "),
    ],
)
def test_every_number_and_name_has_bounds(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, setting)
    assert message in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 3000 + b"]" * 3000, "nested too deep"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"\xff", "not valid TOML"),
        (b"a = ", "not valid TOML"),
        (b"# " + b"x" * (1 << 20), "bytes are too many"),
        (RECIPE.replace('["mine.tsv"]', "[" + "[" * 300 + "]" * 300 + "]").encode(), "is none of"),
        (RECIPE.replace('"mine.tsv"', '"' + "x" * 300 + '.tsv"').encode(), "it is longer than 255 bytes"),
        (RECIPE.replace('"mine.tsv"', r'"a\u0000.tsv"').encode(), "it holds a NUL"),
        (RECIPE.replace('"mine.tsv"', r'["a\u0000", "b"]').encode(), "it holds a NUL"),
        (RECIPE.replace('"mine.tsv"', r'{dataset = "a\u0000"}').encode(), "it holds a NUL"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_data(*read_recipe(str(path)), lambda line: None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200


@pytest.mark.parametrize("name", ["nothing", "a\0b", "x" * 300, "", "/"])
def test_a_recipe_that_is_none_is_one_line(name: str) -> None:
    with pytest.raises(UserError):
        read_recipe(name)


def test_a_shipped_recipe_takes_text_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_recipe("small")[1] == tmp_path
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.toml").write_text(RECIPE, encoding="utf-8")
    assert read_recipe("sub/mine.toml")[1] == tmp_path / "sub"


def test_the_small_recipe_lists_every_key_with_its_default() -> None:
    text = (RECIPES / "small.toml").read_text(encoding="utf-8")
    commented = tomllib.loads("\n".join(re.sub(r"^# (?=\w+ = )", "", line) for line in text.splitlines()))
    given = tomllib.loads(text)
    assert parse(Recipe, commented, where="small.toml")
    usual = TypeAdapter(Recipe).dump_python(parse(Recipe, {**given, **{key: {} for key in SECTIONS}}, where="usual"))
    shape = dataclasses.asdict(preset("small", 1000))
    for section in ("", *SECTIONS):
        listed, default = (values[section] if section else values for values in (commented, usual))
        assert listed.keys() == default.keys(), section
        for key in listed.keys() - (given[section] if section else given).keys() - set(SECTIONS):
            expected = shape[key] if section == "model" else default[key]
            assert listed[key] == (list(expected) if isinstance(expected, tuple) else expected), (section, key)


# What the run works out


def fit(folder: Path, count: int, *settings: str, new: bool = True) -> Recipe:
    text = "".join(f"{line} {number}\t字 {number}\n" for number, line in enumerate(sentences(count, 1)))
    (folder / "mine.tsv").write_text(text, encoding="utf-8")
    recipe = read(folder, *settings)
    data = load_data(recipe, folder, lambda line: None)
    return fitted(recipe, data, new_tokenizer(recipe, data), new=new)


def test_model_and_length_fit_the_text_by_default(tmp_path: Path) -> None:
    few, more = fit(tmp_path, 100), fit(tmp_path, 3000)
    assert few.model.preset == more.model.preset == "tiny"
    # 100 epochs of one or two batches; about 1,500 steps.
    assert few.training.max_steps in (100, 200) and 1500 <= more.training.max_steps < 1600
    for recipe in (few, more):
        training = recipe.training
        assert training.warmup_steps == recipe.evaluation.every == training.max_steps // 10
        assert recipe.tokenizer.vocab_size > 261
        assert "auto" not in str(TypeAdapter(Recipe).dump_python(recipe, mode="json")["training"]["max_steps"])


def test_more_text_makes_a_larger_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.fit._TINY_BELOW", 300)
    assert fit(tmp_path, 200).model.preset == "small"
    assert fit(tmp_path, 200, new=False).model.preset == "auto"


def test_what_a_recipe_says_stays(tmp_path: Path) -> None:
    recipe = fit(tmp_path, 100, "training.max_steps=7", "training.warmup_steps=3", "model.preset=xianyan")
    assert (recipe.training.max_steps, recipe.training.warmup_steps, recipe.evaluation.every) == (7, 3, 1)
    assert recipe.model.preset == "xianyan"


def test_a_resumed_run_keeps_what_it_worked_out(tmp_path: Path) -> None:
    used = fit(tmp_path, 100)
    saved = parse(Recipe, json.loads(json.dumps(TypeAdapter(Recipe).dump_python(used, mode="json"))), where="saved")
    assert saved == used
    again = as_saved(read(tmp_path, "training.max_steps=9"), saved)
    assert again.training.max_steps == 9
    assert as_saved(read(tmp_path), saved) == used


def test_what_is_not_worked_out_yet_is_written_as_auto(tmp_path: Path) -> None:
    recipe = read(tmp_path)
    plain = TypeAdapter(Recipe).dump_python(recipe, mode="json")
    assert plain["training"]["max_steps"] == plain["tokenizer"]["vocab_size"] == "auto"
    assert parse(Recipe, json.loads(json.dumps(plain)), where="again") == recipe


def test_the_warm_up_leaves_most_of_the_run() -> None:
    config = TrainingConfig(learning_rate=1.0, warmup_steps=400, max_steps=40)
    rates = [config.rate(step) for step in range(1, 41)]
    assert rates[9] == max(rates) == 1.0 and rates[10] < 1.0


def test_dry_run_shows_everything_and_writes_nothing(tmp_path: Path) -> None:
    lines = [f"{line} {number}\t字 {number}" for number, line in enumerate(sentences(60, 1))]
    (tmp_path / "mine.tsv").write_text(
        "\n".join([*lines, *[f"foreign {n}\tlatin" for n in range(9)], *[f"\t空 {n}" for n in range(9)]]) + "\n",
        encoding="utf-8",
    )
    read(tmp_path, text=RECIPE.replace('"run"', json.dumps(str(tmp_path / "run"))))
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "translator", "train", str(tmp_path / "mine.toml"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert re.search("- target not in Han script +[1-9]\n", said) and re.search("mine.tsv:6.: foreign . → latin", said)
    assert re.search("- a side is blank +9\n", said) and "mine.tsv:70:  → 空 0" in said
    assert "kept, e.g.\n    mine.tsv:" in said and "dev, e.g.\n    mine.tsv:" in said
    assert "model tiny: " in said and " 100.0 epochs" in said and "vocabulary " in said
    assert sorted(tmp_path.iterdir()) == before
    refused = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--dry-run" in refused.stderr


# Structures layer by layer


LAYERS = 'model.decoder_layers=["multihead", { attention = "rated", rate = 4 }]'


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Rate:
    rate: int = pydantic.Field(default=2, ge=1)


class Rated(CachedMultiheadAttention):
    options = Rate

    def __init__(self, *arguments: Any, options: Rate | None = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.rate = (options or Rate()).rate


def test_layers_have_their_own_structures_and_options_and_say_how_many_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRUCTURES, "rated", Rated)
    recipe = read(tmp_path, LAYERS)
    config = preset("small", 50, **recipe.model.overrides())
    assert config.num_decoder_layers == 2 and config.structures == ("multihead", "rated")
    (tmp_path / "config.json").write_text(to_json(config), encoding="utf-8")
    assert from_json(ModelConfig, tmp_path / "config.json") == config
    first, second = TranslationModel(config).decoder.structures
    assert type(first) is CachedMultiheadAttention and isinstance(second, Rated) and second.rate == 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('decoder_layers=["multihed"]', "decoder_layers[0] = 'multihed': unknown structure; known: "),
        ('decoder_layers=["rated", { attention = "rated", rat = 4 }]', "decoder_layers[1]: unknown key 'rat'; did you"),
        ('decoder_layers=[{ attention = "rated", rate = 0 }]', "decoder_layers[0]: rate = 0: "),
        ('decoder_layers=[{ attention = "multihead", rate = 2 }]', "'multihead' takes no options, not rate"),
        ("decoder_layers=[{ rate = 2 }]", "a layer is a structure's name or a table with `attention`"),
    ],
)
def test_a_slip_in_a_layer_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    monkeypatch.setitem(STRUCTURES, "rated", Rated)
    with pytest.raises(UserError) as error:
        read(tmp_path, f"model.{setting}")
    assert message in str(error.value) and "\n" not in str(error.value) and "mine.toml" in str(error.value)


def test_more_or_fewer_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="decoder_layers names 1 layers and num_decoder_layers is 3"):
        read(tmp_path, 'model.decoder_layers=["multihead"]', "model.num_decoder_layers=3")
