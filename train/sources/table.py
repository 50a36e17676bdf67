"""Tables: one file with a pair a row."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, Pair, field
from translator.config import STRICT
from translator.errors import UserError
from translator.textio import iter_file


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableCorpus(Corpus):
    """One file with a pair a row: .tsv, .csv or .jsonl.

    `source` and `target` name columns of the header line, or keys of the JSON object (`a.b` for b inside a),
    "source" and "target" by default. A .tsv without them has no header: its first two columns are the pair.
    """

    FORM: ClassVar[str] = "a table's file name, {table = …}"

    table: str
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if Path(self.table).suffix.lower() not in _TABLES:
            raise UserError(f"{self.table!r} is not a table: the name must end in {', '.join(_TABLES)}")

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """A file name, or a table with the key `table`."""
        if isinstance(entry, str):
            return {"table": entry}
        return entry if isinstance(entry, dict) and "table" in entry else None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a row; an empty row is an empty pair.

        Raises:
            UserError: the file cannot be read, a column is missing, or a row is malformed (line named).
        """
        path = base / self.table
        for number, source, target in _TABLES[path.suffix.lower()](path, self.source, self.target):
            yield Pair(source, target, f"{self.table}:{number}")


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
        yield number, field(record, source or "source", where), field(record, target or "target", where)


_TABLES: dict[str, Callable[[Path, str | None, str | None], _Rows]] = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".jsonl": _jsonl,
}
