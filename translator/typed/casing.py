"""Sentence case for lines whose case says nothing: ALL CAPS, no capitals at all, A Capital On Every Word."""

import math
from collections.abc import Callable

import regex  # type: ignore[import-untyped]

Score = Callable[[str], float]
"""How likely a word is as it is written: a log-probability."""

# Not what follows a number: `13th`, `5 km`. Placeholders of numbers are the first ten.
_WORD = regex.compile(r"(?<![\p{L}\p{M}\p{N}\uE000-\uE009])\p{L}[\p{L}\p{M}]*(?:'\p{L}+)*")
# A tag that stands at a sentence's first word is none of its words; one apart may stand for any.
_BEGINS = regex.compile(r"(?:^|[.!?…]['\")]*\s)(?:[^\p{L}\p{N}\p{Co}]|[\uE00A-\uE00F](?!\s))*$")
_CLEARLY = 1.0
"""Nats by which another form must beat the one that is usual in such a line."""
_FAR = 3.0
_ONE_PIECE = -14.0
"""Nats: what is less likely is spelled in several pieces, and so no common word."""


def sentence_case(text: str, score: Score) -> str:
    """`text` as a sentence would be written, where its case carries no information; any other text as it is.

    Of a word's forms (lower, Capitalised, UPPER) the likeliest by `score` is taken; the lower one, or in a title the
    capitalised one, unless another is clearly likelier. A sentence's first word is capitalised. One upper-case word
    alone stays unless it is a common word.
    """
    words = [found for found in _WORD.finditer(text) if found[0].upper() != found[0].lower()]
    if not words:
        return text
    form = _form(text, [found[0] for found in words], score)
    if form is None:
        return text
    parts, end = [], 0
    for found in words:
        parts += [text[end : found.start()], form(found[0], score)]
        end = found.end()
        if _BEGINS.search(text, 0, found.start()) and not parts[-1][0].isupper():
            parts[-1] = parts[-1][0].upper() + parts[-1][1:]
    return "".join((*parts, text[end:]))


def _form(text: str, words: list[str], score: Score) -> Callable[[str, Score], str] | None:
    """What gives each word of `text` its case; None where its case says something."""
    if all(word.islower() for word in words):
        return _usual
    if all(word.isupper() for word in words):
        long = [word for word in words if len(word) > 1]
        if long and len(text.split()) > 1 and len(words) > 1:
            return _usual
        # Alone: an acronym, or a shout, which is a common word or ends with its mark.
        common = max(score(words[0].lower()), score(words[0].capitalize()))
        least = -math.inf if "!" in text else _ONE_PIECE
        shout = len(words) == 1 and common > max(least, score(words[0]) + _CLEARLY)
        return _usual if long and shout else None
    # A title in which nothing that is always small is small.
    begun = all(word[0].isupper() and (len(word) == 1 or word[1:].islower() or word.isupper()) for word in words)
    if begun and len(words) >= 3 and any(score(word.lower()) > score(word) + _CLEARLY for word in words[1:]):
        return _from_title
    return None


def _usual(word: str, score: Score) -> str:
    lower, best = word.lower(), max((word.capitalize(), word.upper()), key=score)
    # A name, or "I". What is a common word as it is stays, whatever else it may be.
    return best if score(best) > score(lower) + (_CLEARLY if len(word) == 1 else _FAR) else lower


def _from_title(word: str, score: Score) -> str:
    lower = word.lower()
    if len(word) > 1 and word.isupper():
        return word
    return word if score(word) > score(lower) + _CLEARLY else lower
