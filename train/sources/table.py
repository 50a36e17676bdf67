"""Tables: one file with a pair a row."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, FileName, Pair, field
from train.sources.columns import Columns
from train.sources.files import text_lines, text_suffix
from translator.config import STRICT
from translator.errors import UserError


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableCorpus(Corpus):
    """One file with a pair a row: .tsv, .csv or .jsonl, packed (.gz, .xz, .bz2) or not, or .parquet.

    `source` and `target` name columns of the header line, or keys of the JSON object (`a.b` for b inside a); without
    them see `Columns`. A .tsv without such a header is all text: its first two columns are the pair.
    """

    FORM: ClassVar[str] = "a table's file name, {table = …}"

    table: FileName
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if text_suffix(self.table) not in _TABLES:
            raise UserError(
                f"{self.table!r} is not a table: the name must end in {', '.join(_TABLES)}, or those with .gz, .xz or "
                ".bz2; write two aligned files as [source file, target file], a folder as {dataset = …}"
            )

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
        columns = Columns(self.source, self.target, source_language, target_language)
        for number, source, target in table_rows(base / self.table, columns):
            yield Pair(source, target, f"{self.table}:{number}")


_Rows = Iterator[tuple[int, str, str]]


def is_table(name: str) -> bool:
    """Whether a file of this name is a table."""
    return text_suffix(name) in _TABLES


def table_rows(path: Path, columns: Columns) -> _Rows:
    """Line number, source and target of every row of a table.

    Raises:
        UserError: as `TableCorpus.load`.
    """
    return _TABLES[text_suffix(path.name)](path, columns)


def _tsv(path: Path, columns: Columns) -> _Rows:
    # Tabs only: in a .tsv a quotation mark is text.
    rows = ((number, line.split("\t") if line else []) for number, line in enumerate(text_lines(path), 1))
    first = list(itertools.islice(rows, 1))
    whole = itertools.chain(first, rows)
    if columns.source or columns.target or (first and columns.among(first[0][1])):
        yield from _by_header(path, whole, columns)
        return
    for number, row in whole:
        if len(row) == 1:
            raise UserError(f"{path}:{number}: 1 column; expected source<TAB>target")
        yield (number, row[0], row[1]) if row else (number, "", "")


def _csv(path: Path, columns: Columns) -> _Rows:
    lines = (line + "\n" for line in text_lines(path))
    header = next(lines, "")
    # Spreadsheets of many countries write semicolons; the one under which the header makes sense is meant.
    delimiter = next((mark for mark in ",;\t" if columns.among(next(csv.reader([header], delimiter=mark), []))), ",")

    def rows() -> Iterator[tuple[int, list[str]]]:
        # Strict: a quotation mark that is never closed would otherwise swallow the rest of the file.
        reader = csv.reader(itertools.chain([header], lines), strict=True, delimiter=delimiter)
        number = 1
        try:
            for row in reader:
                yield number, row
                number = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{number}: not valid CSV from here on: {error}") from error

    yield from _by_header(path, rows(), columns)


def _by_header(path: Path, rows: Iterator[tuple[int, list[str]]], columns: Columns) -> _Rows:
    _, header = next(rows, (1, []))
    source, target = columns.of_header(header, f"{path}:1")
    for number, row in rows:
        if row and len(row) != len(header):
            raise UserError(f"{path}:{number}: {len(row)} columns; the header has {len(header)}")
        yield (number, row[source], row[target]) if row else (number, "", "")


def _jsonl(path: Path, columns: Columns) -> _Rows:
    sides: tuple[str, str] | None = None
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            yield number, "", ""
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a JSON object on one line: {error}") from error
        sides = sides or columns.of_record(record, where)
        yield number, field(record, sides[0], where), field(record, sides[1], where)


def _parquet(path: Path, columns: Columns) -> _Rows:
    import pyarrow
    import pyarrow.parquet

    sides: tuple[str, str] | None = None
    number = 0
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    where = f"{path}: row {number}"
                    sides = sides or columns.of_record(record, where)
                    yield number, field(record, sides[0], where), field(record, sides[1], where)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({str(error).splitlines()[0]})") from None


_TABLES: dict[str, Callable[[Path, Columns], _Rows]] = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
