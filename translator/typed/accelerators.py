"""The letter of a menu item that the keyboard reaches it by: `_Open`, `&File`, `打开(_O)`."""

import regex  # type: ignore[import-untyped]

from translator.languages import language

_LONGEST = 60  # characters; a running text's underscore is no accelerator
_APPENDED = regex.compile(r"\s?[(（]([_&~])([A-Za-z0-9])[)）]")
_INLINE = regex.compile(
    r"(?<![\w&~\\/.@<])([_~])(?=[A-Za-z])|(?<=[A-Za-z])(_)(?=[A-Za-z])"
    r"|(?<![\w&])(&)(?=[A-Za-z]\w*(?![\w;]))|(?<=[A-Za-z])(&)(?=[a-z])"
)
_TAIL = regex.compile(r"\s*(?:\.\.\.|…|[:：])?\s*$")


def taken(text: str) -> tuple[str, tuple[str, str] | None]:
    """`text` without its accelerator, and the accelerator: its mark and its letter, in upper case; None without one."""
    if len(text) > _LONGEST or not ("_" in text or "&" in text or "~" in text):
        return text, None
    found = _APPENDED.findall(text)
    if len(found) == 1:
        return _APPENDED.sub("", text), (found[0][0], found[0][1].upper())
    places = list(_INLINE.finditer(text))
    if len(places) != 1 or (places[0].group() == "_" and text.count("_") > 1):
        return text, None
    start, end = places[0].span()
    if "_" in text and regex.fullmatch(r"\S*\w_\w\S*", text) and start and text.islower():
        return text, None  # a name such as max_length
    return text[:start] + text[end:], (places[0].group(), text[end].upper())


def given_back(text: str, accelerator: tuple[str, str] | None, code: str) -> str:
    """`text`, of the language `code`, with the accelerator where that language's programs put it."""
    if accelerator is None or not text:
        return text
    mark, letter = accelerator
    if language(code).primary in ("zh", "ja", "ko"):
        end = _TAIL.search(text).start()
        return f"{text[:end]}({mark}{letter}){text[end:]}"
    starts = [found.start() for found in regex.finditer(r"(?<!\w)\w", text)]
    at = next((start for start in starts if text[start].upper() == letter), -1)
    if at < 0:
        at = text.upper().find(letter)
    if at < 0:
        at = starts[0] if starts else 0
    return text[:at] + mark + text[at:]
