"""The letters of menus that a key is named after: `_Open`, `&File`, `打开(_O)`."""

from dataclasses import dataclass

import regex  # type: ignore[import-untyped]

from translator.languages import language as language_of

_LONGEST, _LONGEST_INSIDE = 80, 40  # characters of a text as interfaces have them
# At a word's beginning, or inside one that begins with a capital: `E_xit`, `Fo&rmat`, but not `a_b`, `R&D`.
_MARKED = regex.compile(
    r"(?:(?<![^\s(\"'])(?P<mark>[_&~])(?=\p{L})|(?<=(?<!\p{L})\p{Lu}\p{Ll}*)(?P<mark>[_&])(?=\p{Ll}))"
)
_ENTITY_OR_PATH = regex.compile(r"&\w+;|~\w*/")
_BESIDE = regex.compile(r"\s*[(（](?P<mark>[_&~])(?P<key>[A-Za-z0-9])[)）]")
_TAIL = regex.compile(r"\s*(?:\.\.\.|…+|[:：])*\s*$")
_TRAILING = {"zh", "ja", "ko"}
"""Languages whose menus write the key behind the text, in parentheses."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`mark` as it was typed, and the letter that it marks."""

    mark: str
    key: str


def strip_accelerator(text: str) -> tuple[str, Accelerator | None]:
    """`text` without the mark of its one accelerator, and that; None where there is none."""
    if len(text) > _LONGEST or not ("_" in text or "&" in text or "~" in text):
        return text, None
    if found := _BESIDE.search(text):
        return text[: found.start()] + text[found.end() :], Accelerator(found["mark"], found["key"].upper())
    found = _MARKED.search(text)
    if not found or text.count(found["mark"]) > 1 or _ENTITY_OR_PATH.match(text, found.start()):
        return text, None
    if text[found.start() - 1 : found.start()].isalpha() and (len(text) > _LONGEST_INSIDE or text[-1] == "."):
        return text, None  # a name with an underscore, in a sentence
    return text[: found.start()] + text[found.end() :], Accelerator(found["mark"], text[found.end()].upper())


def without_key(text: str) -> str:
    """`text` without a key in parentheses behind it, and whatever else looks like one."""
    return _BESIDE.sub("", text) if len(text) <= _LONGEST and ("_" in text or "&" in text or "~" in text) else text


def put_accelerator(text: str, accelerator: Accelerator | None, language: str) -> str:
    """`text` of `language` with the accelerator where that language has it; empty text stays empty."""
    if accelerator is None or not text:
        return text
    mark, key = accelerator.mark, accelerator.key
    if language_of(language).primary in _TRAILING:
        end = _TAIL.search(text).start()
        return f"{text[:end]}({mark}{key}){text[end:]}"
    letters = [place for place, char in enumerate(text) if char.isalpha()]
    if not letters:
        return text
    place = next((one for one in letters if text[one].upper() == key), letters[0])
    return text[:place] + mark + text[place:]
