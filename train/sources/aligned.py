"""Two text files, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, FileName, Pair
from train.sources.files import text_lines
from translator.config import STRICT
from translator.errors import UserError


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class AlignedCorpus(Corpus):
    """Two text files, packed or not: line n of one translates line n of the other."""

    FORM: ClassVar[str] = "[source file, target file]"

    source: FileName
    target: FileName

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """A list of two file names, or a table with the keys `source` and `target` and no other file."""
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(name, str) for name in entry):
            return {"source": entry[0], "target": entry[1]}
        if isinstance(entry, dict) and {"source", "target"} <= entry.keys() and not {"table", "dataset"} & entry.keys():
            return entry
        return None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield line n of both as a pair, blank lines too.

        Raises:
            UserError: a file cannot be read, or the two have different numbers of lines.
        """
        sources, targets = list(text_lines(base / self.source)), list(text_lines(base / self.target))
        if len(sources) != len(targets):
            raise UserError(
                f"{base / self.source} has {len(sources)} lines but {base / self.target} has {len(targets)}: "
                "line n of one must translate line n of the other"
            )
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
            yield Pair(source, target, f"{self.source}:{number}")
