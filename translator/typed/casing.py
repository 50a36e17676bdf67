"""Lines whose case says nothing, in capitals or without any, in the case that a model knows."""

from collections.abc import Callable

import regex  # type: ignore[import-untyped]

_WORD = regex.compile(r"[\p{L}\p{M}]+(?:['’][\p{L}\p{M}]+)*")
_SMALL_WORDS = 3
"""Letters up to which a word is a small one ("of", "the"), which title case or not is told by."""

Score = Callable[[str], float]
"""How likely a word is, as a log-probability; a tokenizer's `likelihood`."""

_MARGIN = 1.0  # by how much a capitalised form has to beat the lower one: sentence starts count for it as well


def restored(text: str, score: Score) -> str:
    """`text` in sentence case where its own case carries no information, else as it is.

    That is: all of two words or more in capitals, or every word of three or more begun with one, or no capital at all.
    Each word then gets the case that `score` finds likeliest, and the first one a capital.
    """
    words = _WORD.findall(text)
    cased = [word for word in words if word.lower() != word.upper()]
    if not cased or not _is_uninformative(text, cased):
        return text
    first = True

    def recased(found: regex.Match[str]) -> str:
        nonlocal first
        word = found.group()
        if word.lower() == word.upper():
            return word
        word, first = _recased(word, first, score), False
        return word

    return _WORD.sub(recased, text)


def _is_uninformative(text: str, cased: list[str]) -> bool:
    if all(word.islower() for word in cased):
        return True
    if all(word.isupper() for word in cased):
        return len(cased) >= 2 and any(len(word) > 1 for word in cased)
    begun = all(word[0].isupper() and not word[1:].isupper() for word in cased if len(word) > 1)
    # Names alone ("New York City Hall") have every capital too: small words tell a title from them.
    return begun and len(cased) >= 3 and any(len(word) <= _SMALL_WORDS and word != "I" for word in cased[1:])


def _recased(word: str, first: bool, score: Score) -> str:
    lower = word.lower()
    forms = [lower, _capitalised(lower)] + [word.upper()] * (len(word) <= 4)
    best = max(forms, key=lambda form: score(form) - (_MARGIN if form != lower else 0.0))
    return _capitalised(best) if first else best


def _capitalised(word: str) -> str:
    return word[:1].upper() + word[1:]
