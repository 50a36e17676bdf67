"""One way of writing for what is typed in many: width, quotes, dashes, dots, spaces. Only sources are changed."""

import regex  # type: ignore[import-untyped]

from translator.languages import language as language_of

_WIDE = {0xFF01 + place: chr(0x21 + place) for place in range(94)}
_WIDE_WORDS = {wide: narrow for wide, narrow in _WIDE.items() if narrow.isalnum()}
_WIDE_IN_NUMBERS = regex.compile(r"(?<=\d)[．，：／－](?=\d)|(?<=\d)％|[＄￥＋－](?=\d)")
_YEN = {"￥": "¥"}

_QUOTES = str.maketrans(dict.fromkeys("“”„‟″«»〝〞〟", '"') | dict.fromkeys("‘’‚‛′‹›´`", "'"))
_CORNERS = str.maketrans(dict.fromkeys("「」", '"') | dict.fromkeys("『』", "'"))
REWRITTEN = frozenset("“”„‟″«»〝〞〟‘’‚‛′‹›´`「」『』…⋯—―–。、【】")
"""Characters that need not be in a vocabulary: `plain` writes them in another way."""
_IDEOGRAPHIC = str.maketrans({"。": ".", "、": ",", "「": '"', "」": '"', "『": '"', "』": '"', "【": "[", "】": "]"})

_DOTS = regex.compile(r"(?:…|⋯|\.(?: ?\.){2,}|。{2,})+")
_DASH = regex.compile(r"\s*(?:[—―]+|(?<![\w-])-{2,3}(?!-)|(?<!-)-{2,3}(?![\w-])|(?<=\p{L})--(?=\p{L}))\s*|\s+–\s+")
_BEFORE_A_MARK = regex.compile(r"(?<=[\p{L}\p{N}\p{Co}\"')\]])\s+(?=[.,!?;:]+(?:[\s\"']|$))")
_BETWEEN_WORDS = regex.compile(r"(?<=\p{L})[,;!?](?=\p{L})")
_AT_A_WIDE_MARK = regex.compile(r"\s+(?=[。，！？；：、])|(?<=[。，！？；：、])\s+")
_BEFORE = r"(?<=[\p{Han}\p{Co}\"')）】》])\s*"
_HALF_AFTER_HAN = regex.compile(rf"{_BEFORE}([?!,;:])(?!//)\s*|{_BEFORE}\.(?=\s*[\"']?$|[\"'])")
_STOP_IN_HAN = regex.compile(r"(?<=\p{Han}[\"'”’」』）)]?)\.(?=[\"'“‘「『（]?\p{Han})")
_FULL = {"?": "？", "!": "！", ",": "，", ";": "；", ":": "：", "": "。"}
_SPACED_MARKS = {"fr", "br"}
"""Languages with a space before `?`, `!`, `;` and `:`."""
_CHANGES = regex.compile(r"[^ !-,./0-;=-~]|-{2}|\.{2}|\. \.| [.,!?;:]|[`]|\p{L}[,;!?]\p{L}")


def full_stops(text: str, language: str) -> str:
    """`text` with a full stop of its own where Chinese has a plain one between two sentences: they are split there."""
    if "." not in text or "Han" not in language_of(language).scripts:
        return text
    return _STOP_IN_HAN.sub("。", text)


def narrow(text: str, language: str) -> str:
    """`text`, of which every character is still one, with full-width letters, digits and what joins digits in ASCII.

    Other full-width punctuation stays in languages without spaces, whose own it is.
    """
    if text.isascii():
        return text
    if language_of(language).spaced:
        return text.translate(_WIDE).replace("￥", "¥")
    text = text.translate(_WIDE_WORDS)
    return _WIDE_IN_NUMBERS.sub(lambda found: _YEN.get(found[0]) or found[0].translate(_WIDE), text)


def plain(text: str, language: str) -> str:
    """A source text, its width settled by `narrow`, with one form for quotes, dots, dashes and spaces at marks."""
    if not _CHANGES.search(text):
        return text
    found = language_of(language)
    text = " ".join(text.translate(_QUOTES).split())
    text = _DASH.sub(" - ", _DOTS.sub("...", text)).strip().replace("–", "-")
    if "Han" in found.scripts:
        text = _HALF_AFTER_HAN.sub(lambda mark: _FULL[mark[1] or ""], text.translate(_CORNERS))
        return _AT_A_WIDE_MARK.sub("", text)
    if not found.spaced:
        return text
    text = _BETWEEN_WORDS.sub(r"\g<0> ", text.translate(_IDEOGRAPHIC))
    return text if found.primary in _SPACED_MARKS else _BEFORE_A_MARK.sub("", text)
