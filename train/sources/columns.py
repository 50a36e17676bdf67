"""Which two columns of a table, or fields of a record, hold the source and the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from translator.errors import UserError
from translator.languages import Language, by_code_or_name, language

_PLAIN = ("source", "target")
_NESTED = "translation"


@dataclass(frozen=True, slots=True)
class Columns:
    """What a recipe says about columns: their names, or else the languages to look for.

    Without names, columns called by both languages are taken (`en`, `zh_CN`, `Chinese`), or else `source` and
    `target`; in a record those languages may also stand inside `translation`.
    """

    source: str | None
    target: str | None
    source_language: str
    target_language: str

    def among(self, names: Sequence[str]) -> tuple[str, str] | None:
        """The two of `names` that hold source and target, each there once; None where there are no such two."""
        found = self._by_language(names) or _PLAIN
        chosen = (self.source or found[0], self.target or found[1])
        return chosen if all(names.count(name) == 1 for name in chosen) else None

    def of_header(self, names: Sequence[str], where: str) -> tuple[int, int]:
        """Places of the two columns in a header; raises `UserError` where it has no such columns."""
        chosen = self.among(names)
        if chosen is None:
            raise self._missing(names, where)
        return names.index(chosen[0]), names.index(chosen[1])

    def of_record(self, record: object, where: str) -> tuple[str, str]:
        """The two fields of a record, dotted where one is inside another; raises `UserError` where it has none."""
        if not isinstance(record, Mapping):
            raise UserError(f"{where}: a record with named fields is wanted, not {type(record).__name__}")
        if self.source and self.target:
            return self.source, self.target
        names = list(map(str, record))
        inner = record.get(_NESTED)
        nested = self._by_language(list(map(str, inner))) if isinstance(inner, Mapping) else None
        found = self._by_language(names) or (nested and tuple(f"{_NESTED}.{name}" for name in nested))
        if found is None and self.source is None and self.target is None and not set(_PLAIN) <= set(names):
            raise self._missing(names if nested is None or not inner else list(map(str, inner)), where)
        found = found or _PLAIN
        return self.source or found[0], self.target or found[1]

    def _by_language(self, names: Sequence[str]) -> tuple[str, str] | None:
        known = [(name, found) for name in names if (found := by_code_or_name(name.strip()))]
        source, target = (_nearest(language(code), known) for code in (self.source_language, self.target_language))
        return (source, target) if source and target and source != target else None

    def _missing(self, names: Sequence[str], where: str) -> UserError:
        held = ", ".join(names) or "none"
        for name in (self.source, self.target):
            if name and names.count(name) != 1:
                return UserError(f"{where}: the header must have one column {name!r}; it has: {held}")
        return UserError(
            f"{where}: no columns for {self.source_language} and {self.target_language}; it has: {held}; "
            'name them in the recipe: { …, source = "…", target = "…" }'
        )


def _nearest(wanted: Language, known: list[tuple[str, Language]]) -> str | None:
    """The one name that is this very language, or else this language in this script, or else the language at all."""
    for key in (lambda one: one.tag, lambda one: (one.primary, one.script), lambda one: one.primary):
        names = [name for name, found in known if key(found) == key(wanted)]
        if names:
            return names[0] if len(names) == 1 else None
    return None
