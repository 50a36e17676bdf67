"""What of a text can be seen: the one place where characters that nobody sees are taken away."""

import regex  # type: ignore[import-untyped]

_TAGS = r"[\U000E0020-\U000E007E]+\U000E007F"
_PICTURE = r"[[\p{Emoji}--[0-9#*]--\p{RI}]||\p{Extended_Pictographic}]"
# All that may follow one, in one order: what is left must be whole too where something between two parts has gone.
_ONE = rf"{_PICTURE}\p{{EMod}}?[\uFE0E\uFE0F]?\u20E3?(?:{_TAGS})?"
EMOJI = rf"(?:\p{{RI}}\p{{RI}}|[0-9#*]\uFE0F?\u20E3|{_ONE}(?:\u200D{_ONE})*)"
"""A whole emoji sequence as Unicode's TR 51 has it: flags, keycaps, skin tones, tags, joined ones."""

# A joiner counts between letters of a cursive script (Persian), and beside a virama (Hindi, Bengali, Sinhala).
_CURSIVE = r"[\p{jt=D}\p{jt=L}\p{jt=R}]"
_JOINER = rf"(?<={_CURSIVE}\p{{Mn}}*)[\u200C\u200D](?=\p{{Mn}}*{_CURSIVE})"
_JOINER += r"|(?<=\p{ccc=9})[\u200C\u200D]|[\u200C\u200D](?=\p{ccc=9})"
_MONGOLIAN = r"(?<=[\p{Mongolian}&&\p{L}])[\u180B-\u180F]"
_HIDDEN = r"[[\p{Cc}\p{Default_Ignorable_Code_Point}\uFFF9-\uFFFB]--[\s\x1C-\x1F\x85]]"

_UNSEEN = regex.compile(_HIDDEN, regex.V1)
_KEPT_OR_UNSEEN = regex.compile(rf"({EMOJI}|{_JOINER}|{_MONGOLIAN})|{_HIDDEN}", regex.V1)


def visible(text: str) -> str:
    """`text` without characters that nobody sees: soft hyphens, zero-width and direction marks, stray selectors.

    They stay inside emoji sequences and where a script needs its joiners. White space stays as it is.
    """
    if text.isprintable() and text.isascii():
        return text
    if not _UNSEEN.search(text):
        return text
    return _KEPT_OR_UNSEEN.sub(lambda found: found[1] or "", text)
