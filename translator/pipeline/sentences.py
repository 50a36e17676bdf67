"""Running text to sentences and back; the numbers of a list apart from their text."""

import logging
import re
from itertools import accumulate, pairwise

from sentencex import segment

from translator.languages import language as language_of

log = logging.getLogger("translator")

LONGEST_LOOK = 4096
"""Characters that the splitter sees at a time: its time grows with the square of what stands between two quotes."""
_CONTEXT = 256

_LONGEST_NUMBER = 24
_NUMBER = r"(?:\d{1,3}(?:\.\d{1,3})*|[ivx]{2,5}|[IVX]{2,5}|[a-zA-Z])"
_ALONE = re.compile(rf"(?:{_NUMBER}\s?[.．)）、。]|[(（]{_NUMBER}[)）])")
_AFTER_A_COLON = re.compile(r".*[:;,：；，]\s*\d{1,3}\s?[.．]")
_AFTER_A_QUOTE = re.compile(r"[.!?。！？…][\"”’」』)）]+\s+(\d{1,3}\s?[.．]\s*)$")
_QUOTES_AND_STOPS = re.compile(r"[“「『（(《]|[”」』）)》]|\"|(?<!\d)[。！？](?=\d)")

_DIGITS, _LETTERS = r"\d{1,3}(?:\.\d{1,3})*", r"(?:[a-hivx]|[ivx]{2,5}|[IVX]{2,5})"
_BRACKETED = rf"[(（](?:{_DIGITS}|{_LETTERS})[)）]\s*|(?:{_DIGITS})[)）、](?!\d)\s*|(?:{_LETTERS}|[A-Z])\)\s+"
# "c. 1900" and "e. g." begin no item.
_STOPPED = rf"(?:{_DIGITS})\s?[.．。](?!\d)\s*|{_LETTERS}\.\s+(?!\d|\w\s?\.)"
_BULLET = r"[•‣◦▪*–—-]\s+"
_MARKER = re.compile(rf"(?:{_BRACKETED}|{_STOPPED}|{_BULLET})(?=\S)")
# Where "3. Mai" is a date, a number and a full stop are not taken for a list's.
_MARKER_BESIDE_ORDINALS = re.compile(rf"(?:{_BRACKETED}|{_BULLET})(?=\S)")
_ORDINALS = {"de", "da", "nb", "nn", "no", "is", "fo", "fi", "et", "lv", "cs", "sk", "pl", "hu", "sl", "hr", "bs", "sr"}
_ORDINALS |= {"tr", "az", "eu", "lb"}
_TO_ASCII = str.maketrans({"．": ".", "。": ".", "、": ".", "（": "(", "）": ")"})


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of `text`, stripped, none blank, by the rules of `language`, a code.

    They hold every character of `text` that isn't white space, in order. The number of a list's item stays with its
    text. The time is linear in the length of `text`. Text that the splitter fails on stays whole.
    """
    # The splitter stumbles over white space of more than one byte; what it sees has the same number of characters.
    plain = "".join(" " if char.isspace() and char != "\n" else char for char in text)
    ends = _refined(plain, _ends(plain, language_of(language).primary))
    sentences = (text[start:end].strip() for start, end in pairwise([0, *ends]))
    return [sentence for sentence in sentences if sentence]


def split_marker(sentence: str, language: str) -> tuple[str, str]:
    """What numbers a list's item (`"2. "`, `"(a) "`, `"3、"`, `"• "`) and its text; `("", sentence)` without one."""
    pattern = _MARKER_BESIDE_ORDINALS if language_of(language).primary in _ORDINALS else _MARKER
    found = pattern.match(sentence)
    return (found.group(), sentence[found.end() :]) if found else ("", sentence)


def marker_text(marker: str, language: str) -> str:
    """A list's number as text of `language`: `"3、"` is `"3. "` where there are spaces between sentences."""
    if not marker or not sentence_gap(language):
        return marker
    return marker.translate(_TO_ASCII).rstrip() + " "


def join_sentences(sentences: list[str], language: str) -> str:
    """Sentences as running text of `language`."""
    return sentence_gap(language).join(sentence for sentence in sentences if sentence)


def sentence_gap(language: str) -> str:
    """What stands between two sentences of running text."""
    return " " if language_of(language).spaced else ""


def _ends(text: str, language: str) -> list[int]:
    """Where each sentence ends; the last is the end of `text`."""
    ends, start = [], 0
    while len(text) - start > LONGEST_LOOK:
        window = text[start : start + LONGEST_LOOK]
        *stops, _ = accumulate(_lengths(window, language))
        if stops:
            # A stop near the end of what the splitter sees lacks what comes after it, a quote perhaps.
            sure = [stop for stop in stops if stop <= LONGEST_LOOK - _CONTEXT] or stops[:1]
            ends += [start + stop for stop in sure]
            start = ends[-1]
        else:  # a very long sentence goes on
            space = window.rfind(" ", LONGEST_LOOK // 2)
            start += space + 1 if space >= 0 else LONGEST_LOOK
    return ends + [start + stop for stop in accumulate(_lengths(text[start:], language))]


def _lengths(text: str, language: str) -> list[int]:
    """The length of each sentence, white space after it included; the whole of `text` if the splitter fails."""
    try:
        found = segment(language, text)
    except BaseException as error:
        # A panic in Rust arrives as something that isn't an `Exception`; Ctrl-C and exit must pass.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.debug("the sentence splitter failed, the text stays whole: %s", error)
        return [len(text)]
    if "".join(found) != text:
        log.debug("the sentence splitter changed the text, which stays whole")
        return [len(text)]
    return [len(sentence) for sentence in found]


def _refined(text: str, ends: list[int]) -> list[int]:
    """Ends as they should be around numbers: `1.` goes on into its text, `。2` begins a sentence outside quotes."""
    refined: list[int] = []
    for start, end in pairwise([0, *ends]):
        refined += [start + stop for stop in _stops_before_numbers(text[start:end])]
        if found := _AFTER_A_QUOTE.search(text[max(start, end - _LONGEST_NUMBER) : end]):
            refined.append(end - len(found.group(1)))
        if end == len(text) or not _awaits_its_item(text, refined[-1] if refined else 0, end):
            refined.append(end)
    return refined


def _awaits_its_item(text: str, start: int, end: int) -> bool:
    """Whether a sentence is, or after a colon ends with, what can only be the number of an item to come."""
    tail = text[max(start, end - _LONGEST_NUMBER) : end].strip()
    return bool(_AFTER_A_COLON.fullmatch(tail) or (end - start <= _LONGEST_NUMBER and _ALONE.fullmatch(tail)))


def _stops_before_numbers(sentence: str) -> list[int]:
    stops, depth, quoted = [], 0, False
    for found in _QUOTES_AND_STOPS.finditer(sentence):
        mark = found.group()
        if mark in "“「『（(《":
            depth += 1
        elif mark in "”」』）)》":
            depth = max(0, depth - 1)
        elif mark == '"':
            quoted = not quoted
        elif not depth and not quoted:
            stops.append(found.end())
    return stops
