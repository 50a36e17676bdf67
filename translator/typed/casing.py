"""Sentence case for lines whose case says nothing: ALL CAPS, no capitals at all, A Capital On Every Word."""

from collections.abc import Callable

import regex  # type: ignore[import-untyped]

Score = Callable[[str], float]
"""How likely a word is as it is written: a log-probability."""

_WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:'\p{L}+)*")
_BEGINS = regex.compile(r"(?:^|[.!?…]['\")]*\s)[^\p{L}\p{Co}\d]*$")
CLEARLY = 1.0
"""Nats by which another form must beat the lower-case one."""
_FAR = 1.5
_ONE_PIECE = -14.0
"""Nats: what is less likely is spelled in several pieces, and so no common word."""


def sentence_case(text: str, score: Score) -> str:
    """`text` as a sentence would be written, where its case carries no information; any other text as it is.

    Of a word's three forms (lower, Capitalised, UPPER) the likeliest by `score` is taken, the lower one unless another
    is clearly likelier. A sentence's first word is capitalised. One upper-case word alone stays unless another form is
    clearly likelier.
    """
    words = [found for found in _WORD.finditer(text) if found[0].upper() != found[0].lower()]
    if not words or not _says_nothing([found[0] for found in words], score):
        return text
    parts, end = [], 0
    for found in words:
        parts += [text[end : found.start()], _written(found[0], score)]
        end = found.end()
        if _BEGINS.search(text, 0, found.start()) and not parts[-1][0].isupper():
            parts[-1] = parts[-1][0].upper() + parts[-1][1:]
    return "".join((*parts, text[end:]))


def _says_nothing(words: list[str], score: Score) -> bool:
    if all(word.islower() for word in words):
        return True
    if all(word.isupper() for word in words):
        long = [word for word in words if len(word) > 1]
        if len(words) > 1:
            return bool(long)
        # Alone: an acronym, or a shout, which is a common word.
        other = max(score(words[0].lower()), score(words[0].capitalize()))
        return bool(long) and other > max(_ONE_PIECE, score(words[0]) + _FAR)
    # A title in which nothing that is always small is small.
    return (
        len(words) >= 3
        and all(word[0].isupper() and (word[1:].islower() or len(word) == 1) for word in words)
        and any(score(word.lower()) > score(word) + _FAR for word in words[1:])
    )


def _written(word: str, score: Score) -> str:
    lower = word.lower()
    best = max((word.capitalize(), word.upper()), key=score)
    return best if score(best) > score(lower) + CLEARLY else lower
