"""Corpora in other programs' files: gettext catalogues, translation memories, Parquet."""

import gzip
from pathlib import Path

import polib
import pyarrow
import pyarrow.parquet
import pytest

from train.sources import parse_corpus
from translator.errors import UserError


def read(entry: object, base: Path, source: str = "en", target: str = "zh") -> list[tuple[str, str, str]]:
    return [(pair.source, pair.target, pair.origin) for pair in parse_corpus(entry).load(source, target, base)]


def catalogue(language: str) -> polib.POFile:
    made = polib.POFile()
    made.metadata = {"Language": language, "Content-Type": "text/plain; charset=UTF-8", "Plural-Forms": "nplurals=1"}
    made.append(polib.POEntry(msgid="Open", msgstr="打开", msgctxt="menu"))
    made.append(polib.POEntry(msgid="Untranslated", msgstr=""))
    made.append(polib.POEntry(msgid="Unsure", msgstr="不确定", flags=["fuzzy"]))
    made.append(polib.POEntry(msgid="Old", msgstr="旧", obsolete=True))
    made.append(polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "%d 个文件"}))
    return made


@pytest.mark.parametrize("suffix", [".po", ".mo"])
def test_a_catalogue_gives_what_is_translated(tmp_path: Path, suffix: str) -> None:
    made = catalogue("zh_CN")
    (made.save if suffix == ".po" else made.save_as_mofile)(str(tmp_path / f"a{suffix}"))
    found = read(f"a{suffix}", tmp_path)
    assert sorted(pair[:2] for pair in found) == [("%d file", "%d 个文件"), ("%d files", "%d 个文件"), ("Open", "打开")]
    assert all(origin.startswith(f"a{suffix}:") for *_, origin in found)
    turned = read({"catalogue": f"a{suffix}", "repeat": 2}, tmp_path, "zh", "en")
    assert ("打开", "Open") in [pair[:2] for pair in turned]


def test_a_catalogue_of_a_third_language_is_refused(tmp_path: Path) -> None:
    catalogue("de").save(str(tmp_path / "a.po"))
    with pytest.raises(UserError, match=r"a\.po: its header says Language: de; the recipe is en to zh"):
        read("a.po", tmp_path)


TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd" [<!ENTITY boom "BOOM">]>
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="en-US"><seg>Hello <bpt i="1">&lt;b&gt;</bpt>big<ept i="1">&lt;/b&gt;</ept>
 <hi>world</hi>.</seg></tuv>
    <tuv xml:lang="zh_CN"><seg>你好，
 大世界。</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Only here</seg></tuv><tuv xml:lang="de"><seg>Nur hier</seg></tuv></tu>
<tu><tuv lang="ZH"><seg>再见。</seg></tuv><tuv lang="EN"><seg>Good &boom;bye.</seg></tuv></tu>
</body></tmx>
"""


@pytest.mark.parametrize("name", ["m.tmx", "m.tmx.gz"])
def test_a_memory_gives_a_pair_a_unit_in_either_direction(tmp_path: Path, name: str) -> None:
    (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wb").write(TMX.encode())
    assert [pair[:2] for pair in read(name, tmp_path)] == [
        ("Hello big world.", "你好， 大世界。"),
        ("Good bye.", "再见。"),  # an entity is never filled in
    ]
    assert read({"memory": name}, tmp_path, "zh", "en")[1][:2] == ("再见。", "Good bye.")


def test_a_memory_that_is_broken_or_of_other_languages_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.tmx").write_text(TMX)
    with pytest.raises(UserError, match=r"m\.tmx: none of its 3 units has both en and fr"):
        read("m.tmx", tmp_path, "en", "fr")
    (tmp_path / "m.tmx").write_text(TMX.replace("</seg></tuv></tu>\n</body>", "</tuv></tu>\n</body>"))
    with pytest.raises(UserError, match=r"m\.tmx:\d+: not well-formed XML"):
        read("m.tmx", tmp_path)
    with pytest.raises(UserError, match=r"no\.tmx: cannot be read"):
        read("no.tmx", tmp_path)


def test_parquet_has_columns_or_a_translation_inside(tmp_path: Path) -> None:
    flat = pyarrow.table({"id": [1, 2], "en": ["One.", "Two."], "zh": ["一。", "二。"]})
    pyarrow.parquet.write_table(flat, tmp_path / "flat.parquet")
    expected = [("One.", "一。"), ("Two.", "二。")]
    assert [pair[:2] for pair in read("flat.parquet", tmp_path)] == expected
    nested = pyarrow.table({"translation": [{"en": "One.", "zh": "一。"}, {"en": "Two.", "zh": "二。"}]})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    assert [pair[:2] for pair in read("nested.parquet", tmp_path, "zh", "en")] == [pair[::-1] for pair in expected]
    named = {"table": "flat.parquet", "source": "zh", "target": "id"}
    with pytest.raises(UserError, match=r"flat\.parquet: row 1: field 'id' is int, not text"):
        read(named, tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(UserError, match=r"bad\.parquet: not a Parquet file"):
        read("bad.parquet", tmp_path)
