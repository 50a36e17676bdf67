"""Gettext catalogues: the messages of a program and their translations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import polib
import pydantic

from train.sources.base import Corpus, FileName, Pair
from translator.config import STRICT
from translator.errors import UserError
from translator.languages import by_code_or_name, language

_READERS = {".po": polib.pofile, ".mo": polib.mofile}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class CatalogueCorpus(Corpus):
    """A `.po` or `.mo` file: each message is a source, its translation the target.

    It is the other way round where the catalogue's header says that it translates into the recipe's source language.
    Messages without translation, fuzzy and obsolete ones give nothing; a plural gives its first and its last form.
    """

    FORM: ClassVar[str] = "a catalogue's file name (.po, .mo), {catalogue = …}"

    catalogue: FileName

    def __post_init__(self) -> None:
        if Path(self.catalogue).suffix.lower() not in _READERS:
            raise UserError(f"{self.catalogue!r} is not a gettext catalogue: the name must end in .po or .mo")

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """A file name that ends in .po or .mo, or a table with the key `catalogue`."""
        if isinstance(entry, str) and Path(entry).suffix.lower() in _READERS:
            return {"catalogue": entry}
        return entry if isinstance(entry, dict) and "catalogue" in entry else None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a translated message.

        Raises:
            UserError: the file is missing or is no catalogue, or its header names a third language.
        """
        path = base / self.catalogue
        try:
            if not path.is_file():
                raise UserError(f"{path}: no such file")
            entries = _READERS[path.suffix.lower()](str(path))
        except (OSError, ValueError, UnicodeError) as error:
            raise UserError(f"{path}: not a gettext catalogue that can be read ({error})") from None
        turned = self._is_turned(path, entries.metadata.get("Language", ""), source_language, target_language)
        for number, entry in enumerate(entries, 1):
            if entry.obsolete or "fuzzy" in getattr(entry, "flags", ()):
                continue
            origin = f"{self.catalogue}:{getattr(entry, 'linenum', number)}"
            for message, translation in _texts(entry):
                if message and translation:
                    pair = Pair(message, translation, origin)
                    yield Pair(translation, message, origin) if turned else pair

    @staticmethod
    def _is_turned(path: Path, named: str, source_language: str, target_language: str) -> bool:
        into = by_code_or_name(named.replace("_", "-")) if named else None
        if into is None or into.primary == language(target_language).primary:
            return False
        if into.primary == language(source_language).primary:
            return True
        raise UserError(
            f"{path}: its header says Language: {named}; the recipe is {source_language} to {target_language}"
        )


def _texts(entry: polib.POEntry) -> Iterator[tuple[str, str]]:
    if not entry.msgid_plural:
        yield entry.msgid, entry.msgstr
        return
    forms = [text for _, text in sorted(entry.msgstr_plural.items())]
    if forms:
        yield entry.msgid, forms[0]
        yield entry.msgid_plural, forms[-1]
