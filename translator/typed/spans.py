"""What has to come through a translation as it is: found, replaced by placeholders, and put back."""

import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import regex  # type: ignore[import-untyped]

from translator.typed.slots import NUMBERS, OTHERS, SLOTS
from translator.typed.visible import EMOJI

# Letters are ASCII ones in these patterns: names in programs are, and Chinese has no space before a name. None may take
# longer than in proportion to the text, so that names begin where no other could, and what repeats is bounded.
_ALONE = r"(?<![\w.+/@-])"
_SUFFIXES = "|".join(
    sorted(
        {suffix[1:] for suffix in mimetypes.types_map if regex.fullmatch(r"\.[a-z][a-z0-9]{1,4}", suffix)}
        | {"7z", "bz2", "cfg", "conf", "deb", "docx", "exe", "gz", "ini", "iso", "jpg", "log", "md", "odt", "php"}
        | {"pptx", "rar", "rpm", "sql", "toml", "ts", "xlsx", "xz", "yaml", "yml", "zip"},
        key=len,
        reverse=True,
    )
)
_HOSTS = "com|org|net|edu|gov|io|info|dev|app|co|uk|de|fr|eu|cn|jp|kr|us|ca|au|example|test|local"
_IN_URL = r"[[!-~]--[<>\"'`]]"
_URL = (
    rf"(?i:https?|ftp|file|ssh|git)://{_IN_URL}*[\w/]|mailto:[\w.+-]+@[\w.-]+\w"
    rf"|www\.[\w-]+(?:\.[\w-]+)+(?:[/?#](?:{_IN_URL}*[\w/])?)?"
)
_EMAIL = rf"{_ALONE}[\w.+-]{{1,64}}@(?:[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{0,8}}\.(?i:[a-z]{{2,20}})|localhost)"
_HOST = rf"{_ALONE}(?:[a-z0-9][a-z0-9-]{{0,62}}\.){{1,8}}(?:{_HOSTS})(?::\d+)?(?:/(?:{_IN_URL}*[\w/])?)?(?![\w-]|\.\w)"
_SUFFIX = rf"\.(?:{_SUFFIXES}|{_SUFFIXES.upper()})(?![\w-]|\.\w)"
_FILE = (
    rf"{_ALONE}(?:[\w.+-]{{1,64}}/){{0,16}}[\w.+-]{{0,63}}\w{_SUFFIX}|(?<=[^\x00-\x7F]){_SUFFIX}|\*\.\w+"
    r"|(?<!\S)\.[a-z]\w*rc(?!\w)"
)
_PATH = (
    r"(?<!\w)[A-Za-z]:\\[\w\\.~-]*(?<!\.)|(?<![\w/.<~)])(?:~|\.{1,2})?/\.?[A-Za-z][\w.@+-]*(?:/[\w.@+*-]+)*/?(?<![.,])"
)
_FORMAT = (
    r"%\(\w+\)[#0+-]*\d*(?:\.\d+)?[a-zA-Z]|%\{\w+\}|%(?:\d+\$)?[#0+'-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?"
    r"(?:hh|h|ll|l|L|z|j|t)?(?:[diouxXeEfFgGcsSpn](?![a-zA-Z])|@)|%%|%[A-Za-z_]\w*%|%[1-9]\d?(?!\d)"
)
_BRACED = r"\$?\{\{[^{}\n]{0,60}\}\}|[$#]?\{[\w.:!$\[\]-]{0,60}\}|\$\([\w.]+\)|\$[A-Za-z_]\w*(?:/[\w./-]*\w)?"
_TAG = r"</?(?:[A-Za-z][^<>\n]{0,200}|\d{1,4})/?>|<!--[^\n]{0,200}?-->|&(?:[A-Za-z]{2,8}|#\d{1,6}|#x[0-9A-Fa-f]{1,5});"
_CODE = rf"`[^`\n]+`|\\[ntr\d\"'\\]|\*\*|~~|{_ALONE}[A-Za-z_]\w*(?:\.\w+){{0,8}}\(\)"
_NAME = (
    r"(?<![\w-])--[a-z][\w-]+|(?<!\w)[A-Za-z]\w*_\w*[A-Za-z0-9]|(?<![\w.])@[A-Za-z0-9_]\w*@?"
    r"|(?<![\p{L}\p{N}_&])#[\p{L}\p{N}_]*[\p{L}_][\p{L}\p{N}_]*"
)
_SMILE = r"(?<!\S)(?:[:;=]-?[()DPp]|<3)(?!\S)|(?<!\w)C(?:\+\+|#)(?!\w)"
# Ctrl+Shift+F10; MP3, COVID-19, A4, v2.0, B1:C3; 4K, 3D
_CODED = (
    r"(?<![\w+])[A-Z][A-Za-z]{0,9}(?:\+[A-Za-z0-9]{1,10}){1,4}(?![\w+])|"
    r"(?<![\w.])(?:[A-Za-z]+-?\d+(?:\.\d+)*[A-Za-z0-9]*(?:[-:][A-Za-z0-9]+){0,8}"
    r"|\d+(?:\.\d+)*-?(?!(?:AM|PM|ST|ND|RD|TH|KM|KG|CM|MM|S)(?!\w))[A-Z]{1,4}\d*)(?!\w)"
)
_SIGN = r"(?:US|HK|NT|A|C)?[$€£¥₹₩₽]"
_PHONE = r"(?<![\w+])(?:\+\d{1,3}(?: \(?\d{1,5}\)?){1,2}(?:[ -]\d{2,5}){1,3}|\(\d{2,5}\) ?\d{3,4}[ -]\d{3,5})(?![\d-])"
_NUMBER = (
    rf"(?<!\d)(?:{_SIGN}\s?[+-]?|(?<![\w)])[+-])?\d{{1,40}}(?:[.,:/-]\d{{1,40}}){{0,8}}(?:[eE][+-]?\d{{1,4}}(?!\w)|×10\^-?\d{{1,4}})?"
    r"(?:\s?[%‰€£°]C?(?![A-Za-z\d({])|℃)?"
)
# A month is a number with a name, and 3万 is 30,000: their values count.
_COUNTED = r"(?!\d|[.,:/-]\d|\s?[月万亿千百])"

_OTHERS = "|".join([_URL, _EMAIL, _TAG, _CODE, _FORMAT, _BRACED, _NAME, _PATH, _FILE, _HOST, _SMILE, _CODED])
_OTHERS, _NUMBERS = (
    pattern.replace(r"\w", "[A-Za-z0-9_]").replace(r"\d", "[0-9]")
    for pattern in (_OTHERS, f"{_PHONE}|{_NUMBER}{_COUNTED}")
)
_PATTERN = regex.compile(rf"(?P<other>(?:{EMOJI})+|{_OTHERS}|[\uE000-\uE00F])|(?P<number>{_NUMBERS})", regex.V1)
_MAY_HOLD = regex.compile(
    r"[0-9@#%$<{`*\\/&_~\uE000-\uE00F]|\.[A-Za-z]|--|[:;=]-?[()DPp]|\(\)|[[\p{Emoji}--[0-9#*]]]", regex.V1
)
_IDEOGRAPHS = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_LETTERS = rf"[[\p{{L}}\p{{M}}\p{{N}}]--{_IDEOGRAPHS}]+"
_WORD = regex.compile(rf"{_IDEOGRAPHS}|{_LETTERS}(?:['-]{_LETTERS})*|[^\s\p{{L}}\p{{M}}\p{{N}}]", regex.V1)


@dataclass(frozen=True, slots=True)
class Span:
    """`text[start:end]`, which is to come through; `number` says that it is one."""

    start: int
    end: int
    text: str
    number: bool


def find(text: str, known: frozenset[str] | None = None) -> list[Span]:
    """The spans of `text`, in order: numbers, addresses, names of files, tags, placeholders, code, emoji.

    With `known` also words that hold a character outside it: in pieces of bytes it would cut what comes after it.
    """
    spans = []
    if _MAY_HOLD.search(text):
        for found in _PATTERN.finditer(text):
            start, end = found.span()
            spans.append(Span(start, end, found[0], found.lastgroup == "number"))
    if known is not None:
        spans = _with_unknown(text, spans, known)
    return spans


def _with_unknown(text: str, spans: list[Span], known: frozenset[str]) -> list[Span]:
    if known.issuperset(text):
        return spans
    taken = [False] * len(text)
    for span in spans:
        taken[span.start : span.end] = [True] * (span.end - span.start)
    words: list[tuple[int, int]] = []
    for found in _WORD.finditer(text):
        start, end = found.span()
        if any(taken[start:end]) or known.issuperset(found[0]) or found[0] in SLOTS:
            continue
        # Foreign words in a row are one: there are only so many placeholders.
        if words and not any(taken[words[-1][1] : start]) and not text[words[-1][1] : start].strip():
            words[-1] = words[-1][0], end
        else:
            words.append((start, end))
    return sorted([*spans, *(Span(a, b, text[a:b], False) for a, b in words)], key=lambda span: span.start)


def assign(spans: Sequence[Span], numbers: Sequence[str] = NUMBERS, others: Sequence[str] = OTHERS) -> dict[str, str]:
    """A placeholder for each text of `spans`, in order; equal ones share it, and those that come too late have none."""
    slots: dict[str, str] = {}
    free = {True: iter(numbers), False: iter(others)}
    for span in spans:
        if span.text not in slots and (slot := next(free[span.number], None)):
            slots[span.text] = slot
    return slots


def mask(text: str, spans: Sequence[Span], slots: Mapping[str, str]) -> str:
    """`text` with the placeholder of each span in its place; a placeholder that was typed goes where it has none."""
    parts, end = [], 0
    for span in spans:
        own = text[span.start : span.end]
        parts += [text[end : span.start], slots.get(span.text, "" if own in SLOTS else own)]
        end = span.end
    return "".join((*parts, text[end:]))


def protect(text: str, known: frozenset[str] | None = None) -> tuple[str, dict[str, str]]:
    """`text` with placeholders for its spans, and the text of each placeholder."""
    spans = find(text, known)
    if not spans:
        return text, {}
    slots = assign(spans)
    return mask(text, spans, slots), {slot: own for own, slot in slots.items()}


def restore(text: str, spans: Mapping[str, str]) -> str:
    """`text` with what stands for each placeholder; those that stand for nothing go."""
    if not any(slot in text for slot in SLOTS):
        return text
    return "".join(spans.get(char, "") if char in SLOTS else char for char in text)


def same_slots(text: str, other: str) -> bool:
    """Whether two texts hold the same placeholders, each equally often."""
    return sorted(char for char in text if char in SLOTS) == sorted(char for char in other if char in SLOTS)
