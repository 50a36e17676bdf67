"""What of a catalogue is worth learning from: pairs of lines whose two sides say the same."""

import re
from collections.abc import Iterable, Iterator

import opencc

_HAN = re.compile(r"[\u3400-\u9fff]")
_LATIN = re.compile(r"[A-Za-z]")
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"\d+")
_FORMAT = re.compile(r"%(?:\d+\$)?[-+ 0#]*\d*(?:\.\d+)?(?:\([a-z_]+\))?[a-zA-Z]|\{[^{}\s]*\}|\$\w+|<[^<>]*>")
_LONGEST = 400
_LIST_OF_LINES = re.compile(r"\s*\n\s*")


def cleaned(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The usable ones of `texts`, each on one line, no pair twice.

    Entries of several lines are taken line by line where both sides have as many, else left out. The Chinese is
    converted to simplified characters. Left out are copies, what has no words, what is far longer on one side, and what
    has other numbers or format fields on one side.
    """
    simplified = opencc.OpenCC("t2s").convert
    seen = set()
    for english, chinese in texts:
        for pair in _lines(english, simplified(chinese)):
            if pair not in seen and _fits(*pair):
                seen.add(pair)
                yield pair


def _lines(english: str, chinese: str) -> Iterator[tuple[str, str]]:
    ours = [_one_space(line) for line in _LIST_OF_LINES.split(english.strip()) if line.strip()]
    theirs = [_one_space(line) for line in _LIST_OF_LINES.split(chinese.strip()) if line.strip()]
    if len(ours) == len(theirs):
        yield from zip(ours, theirs, strict=True)


def _one_space(line: str) -> str:
    return " ".join(line.split())


def _fits(english: str, chinese: str) -> bool:
    words, characters = len(_WORD.findall(english)), len(_HAN.findall(chinese))
    if not words or not characters or max(len(english), len(chinese)) > _LONGEST or _HAN.search(english):
        return False
    if len(_LATIN.findall(chinese)) > 3 * characters + 20:
        return False
    if max(words, characters) > 8 and not words / 3 <= characters <= words * 6:
        return False
    if sorted(_FORMAT.findall(english)) != sorted(_FORMAT.findall(chinese)):
        return False
    ours, theirs = set(_NUMBER.findall(english)), set(_NUMBER.findall(chinese))
    return not (ours and theirs) or bool(ours & theirs)
