"""What has to come through a translation as it is: cut out before, and put back after."""

from collections.abc import Callable, Sequence

import regex  # type: ignore[import-untyped]

SLOTS = tuple(chr(0xE000 + number) for number in range(16))
"""Private-use characters that stand for what was cut out; each is one piece of the vocabulary."""

Knows = Callable[[str], bool]
"""Whether the vocabulary spells a word without bytes; a tokenizer's `knows`."""

_SPANS = (
    r"`[^`\s][^`]*`",  # code
    r"</?[A-Za-z][^<>]*>|&(?:[A-Za-z]+|#\d+|#x[0-9A-Fa-f]+);",  # tags, entities
    r"(?:https?|ftp|file)://[^\s<>\"'，。！？；：）》、]*[^\s<>\"'，。！？；：）》、.,!?;:)]|www\.[\w./?=&%#~-]*[\w/]",
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    r"%\(\w+\)[#0 +-]*\d*(?:\.\d+)?[a-zA-Z]|%(?:\d+\$)?[#0+-]*\d*(?:\.\d+)?(?:hh|h|ll|l|z)?[sdiufFeEgGxXcp](?![\p{L}])"
    r"|%\{\w+\}|%\w+%|%\d+|\$\{[^{}\s]*\}|\$\([^()\s]*\)|\{\{[^{}]*\}\}|\{[\w.:!]*\}|\$[A-Za-z_]\w*|%[A-Z]\w*",
    r"\\[ntr0](?![\w])|\\n|\\t",
    r"(?<![\w/])(?:~|\.{1,2})?/(?:[\w.+-]+/)*[\w.+-]*\w(?![\w])|[A-Za-z]:\\[\w\\.-]+",  # paths
    r"(?<![\w@])[@#][A-Za-z_]\w+",
    r"(?<![\w-])--?[a-z][\w-]*(?:=[\w.]+)?(?![\w])",  # options of a command
    r"(?<![\w.])[\w-]+\.(?:txt|pdf|docx?|xlsx?|pptx?|od[tsp]|html?|css|js|json|xml|csv|tsv|zip|tar|gz|png|jpe?g|gif|svg"
    r"|mp[34]|wav|py|sh|conf|cfg|ini|log|exe|deb|com|org|net|md|toml|ya?ml)(?![\w])",
    r"(?:\p{Extended_Pictographic}|\p{Regional_Indicator}{2}|[0-9#*]\ufe0f?\u20e3)"
    r"(?:\ufe0f|\p{Emoji_Modifier}|[\U000e0020-\U000e007f]|\u200d\p{Extended_Pictographic})*",
    r"[\ue000-\uf8ff]+",
)
_NUMBER = (
    r"[$€£¥₹￥]\s?\d+(?:[.,:]\d+)*%?"
    r"|(?<![\p{L}\d_])[vV]\d+(?:\.\d+)+"
    r"|(?<![\p{Latin}_])\+?\d+(?:[-/.:,'x×]\d+)*(?:\s?[%‰€£](?![\p{L}\d])|°[CF]?)?"
)
# A month's number is translated, and so is one that a unit of ten thousand follows.
_NUMBER_IN_CHINESE = rf"(?<!\d)(?!\d{{1,2}}月)(?!\d+(?:\.\d+)?[万亿千百十])(?:{_NUMBER})"
_LATIN = regex.compile("|".join((*_SPANS, _NUMBER)))
_HAN = regex.compile("|".join((*_SPANS, _NUMBER_IN_CHINESE)))
_MAYBE = regex.compile(r"[\d`<&@%{$\\/#~\-\ue000-\uf8ff]|\p{Extended_Pictographic}|\w\.\w|www")
_WORD = regex.compile(r"\S+")
_CORE = regex.compile(r"[^\p{P}\p{S}\s\p{Han}]+(?:[-'’.][^\p{P}\p{S}\s\p{Han}]+)*|[^\x00-\x7f]")


def protected(text: str, chinese: bool = False, knows: Knows | None = None) -> tuple[str, list[str]]:
    """`text` with each span that must come through whole replaced by one of `SLOTS`, and the spans, in order.

    Spans are numbers with their signs, times, dates in digits, money, addresses, paths, placeholders of programs, tags,
    emoji, and words that hold a character that the vocabulary doesn't know. Those beyond the number of slots stay.
    """
    spans: list[str] = []

    def slot(found: "regex.Match[str]") -> str:
        span = found.group()
        if not span or len(spans) == len(SLOTS):
            return "" if span and SLOTS[0] <= span[0] <= "\uf8ff" else span
        spans.append(span)
        return SLOTS[len(spans) - 1]

    unknown = knows is not None and not text.isascii() and not knows(text)
    if not unknown and not _MAYBE.search(text):
        return text, spans
    if not unknown:
        return (_HAN if chinese else _LATIN).sub(slot, text), spans
    known = knows
    assert known is not None
    places = [found.span() for found in (_HAN if chinese else _LATIN).finditer(text) if found.group()]
    taken = [False] * len(text)
    for start, end in places:
        taken[start:end] = [True] * (end - start)
    for found in _CORE.finditer(text):
        if not any(taken[found.start() : found.end()]) and not found.group().isascii() and not known(found.group()):
            places.append(found.span())
    parts, end = [], 0
    for start, stop in sorted(places):
        parts.append(text[end:start])
        if len(spans) < len(SLOTS):
            parts.append(SLOTS[len(spans)])
            spans.append(text[start:stop])
        elif not SLOTS[0] <= text[start] <= "\uf8ff":
            parts.append(text[start:stop])
        end = stop
    return "".join([*parts, text[end:]]), spans


def restored(text: str, spans: Sequence[str]) -> str:
    """`text` with the spans in the places of their slots; a slot without a span gives nothing."""
    if not any(SLOTS[0] <= character <= SLOTS[-1] for character in text):
        return text
    return "".join(
        (spans[ord(character) - 0xE000] if ord(character) - 0xE000 < len(spans) else "")
        if SLOTS[0] <= character <= SLOTS[-1]
        else character
        for character in text
    )


def holds_all(text: str, spans: Sequence[str]) -> bool:
    """Whether `text` has each span's slot once, and no other."""
    found = sorted(character for character in text if SLOTS[0] <= character <= SLOTS[-1])
    return found == list(SLOTS[: len(spans)])
