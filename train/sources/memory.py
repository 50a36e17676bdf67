"""Translation memories: TMX files (LISA's Translation Memory eXchange, 1.4b)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic
from lxml import etree

from train.sources.base import Corpus, FileName, Pair
from train.sources.files import opened, text_suffix
from translator.config import STRICT
from translator.errors import UserError
from translator.languages import Language, by_code_or_name, language

_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
# Inside a segment, markup of the document it came from: its text is codes, not words.
_CODES = {"bpt", "ept", "ph", "it", "ut"}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MemoryCorpus(Corpus):
    """A `.tmx` file, packed or not, read unit by unit: one that has both languages gives a pair."""

    FORM: ClassVar[str] = "a translation memory's file name (.tmx), {memory = …}"

    memory: FileName

    def __post_init__(self) -> None:
        if text_suffix(self.memory) != ".tmx":
            raise UserError(f"{self.memory!r} is not a translation memory: the name must end in .tmx, or .tmx.gz, …")

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """A file name that ends in .tmx, or a table with the key `memory`."""
        if isinstance(entry, str) and text_suffix(entry) == ".tmx":
            return {"memory": entry}
        return entry if isinstance(entry, dict) and "memory" in entry else None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a unit, in file order; units that lack one of the languages give none.

        Raises:
            UserError: the file is missing, is not well-formed XML (line named), or no unit has both languages.
        """
        path = base / self.memory
        wanted = language(source_language), language(target_language)
        units = pairs = 0
        try:
            with opened(path) as file:
                # No entities and no network: a memory is data, whoever made it.
                parsed = etree.iterparse(file, tag="{*}tu", resolve_entities=False, no_network=True, load_dtd=False)
                for _, unit in parsed:
                    units += 1
                    source, target = _sides(unit, wanted)
                    line = unit.sourceline
                    unit.clear()
                    while unit.getprevious() is not None:  # or the whole file is kept
                        del unit.getparent()[0]
                    if source is not None and target is not None:
                        pairs += 1
                        yield Pair(source, target, f"{self.memory}:{line}")
        except etree.XMLSyntaxError as error:
            raise UserError(f"{path}:{error.lineno}: not well-formed XML ({error.msg})") from None
        if not pairs:
            raise UserError(f"{path}: none of its {units:,} units has both {source_language} and {target_language}")


def _sides(unit: Any, wanted: tuple[Language, Language]) -> tuple[str | None, str | None]:
    """The unit's first text in each language."""
    found: list[str | None] = [None, None]
    for variant in unit.iterchildren("{*}tuv"):
        spoken = by_code_or_name((variant.get(_LANG) or variant.get("lang") or "").strip().replace("_", "-"))
        segment = next(variant.iterchildren("{*}seg"), None)
        if spoken is None or segment is None:
            continue
        for side, one in enumerate(wanted):
            if found[side] is None and spoken.primary == one.primary:
                found[side] = " ".join(_text(segment).split())
    return found[0], found[1]


def _text(element: Any) -> str:
    parts = [element.text or ""]
    for child in element:
        if isinstance(child.tag, str) and etree.QName(child).localname not in _CODES:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)
