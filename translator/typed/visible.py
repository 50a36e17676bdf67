"""Characters that nobody sees, taken out of text before it becomes tokens."""

import regex  # type: ignore[import-untyped]

# Unicode's default-ignorable characters (joiners, direction marks, variation selectors, soft hyphen, byte order mark,
# tags), and control characters that aren't white space.
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cc}&&[^\t-\r\x1c-\x1f\x85 ]]", regex.VERSION1)

# Emoji sequences keep theirs (UTS 51): selectors, joiners between pictures, keycaps, the tags of flags.
_EMOJI = regex.compile(
    r"(?:\p{Extended_Pictographic}|\p{Regional_Indicator}|[0-9#*](?=\ufe0f?\u20e3))"
    r"(?:\ufe0f|\u20e3|\p{Emoji_Modifier}|[\U000e0020-\U000e007f]|\u200d(?=\p{Extended_Pictographic})"
    r"|(?<=\u200d\ufe0f?)\p{Extended_Pictographic}|(?<=\u200d)\p{Extended_Pictographic})*"
)
# Scripts in which a joiner, or its absence, changes how letters are drawn, and what they mean.
_JOINED = (
    r"[\p{scx=Arab}\p{scx=Syrc}\p{scx=Mong}\p{scx=Nkoo}\p{scx=Deva}\p{scx=Beng}\p{scx=Guru}\p{scx=Gujr}\p{scx=Orya}"
    r"\p{scx=Taml}\p{scx=Telu}\p{scx=Knda}\p{scx=Mlym}\p{scx=Sinh}\p{scx=Khmr}\p{scx=Mymr}\p{scx=Tibt}\p{scx=Thai}]"
)
_JOINER = regex.compile(rf"(?<={_JOINED}\p{{M}}*)[\u200c\u200d](?={_JOINED})")


def visible(text: str) -> str:
    """`text` without the characters nobody sees: both sides of a pair in training, and every source in translation.

    What emoji are made of stays, and joiners between letters of scripts that need them. White space stays.
    """
    if text.isascii() and text.isprintable():
        return text
    if not _UNSEEN.search(text):
        return text
    kept = sorted(
        [found.span() for found in _EMOJI.finditer(text)] + [found.span() for found in _JOINER.finditer(text)]
    )
    parts, end = [], 0
    for start, stop in kept:
        parts += [_UNSEEN.sub("", text[end:start]), text[start:stop]]
        end = stop
    return "".join([*parts, _UNSEEN.sub("", text[end:])])
