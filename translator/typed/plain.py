"""One form for what people type in several: quotes, dashes, widths, spaces, marks."""

import regex  # type: ignore[import-untyped]

from translator.languages import language

_QUOTES = str.maketrans(
    {
        **dict.fromkeys("“”„‟«»〝〞＂″", '"'),
        **dict.fromkeys("‘’‚‛`´′＇", "'"),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        "…": "...",
        "⋯": "...",
    }
)
_FULL_WIDTH = {0xFF01 + place: 0x21 + place for place in range(0x5E)}
_WIDE_LETTERS = {wide: plain for wide, plain in _FULL_WIDTH.items() if chr(plain).isalnum() or chr(plain) in "%$+@#&/"}
_WIDE_MARKS = {**_FULL_WIDTH, ord("。"): ord("."), ord("、"): ord(","), 0x3000: ord(" ")}
_DASHES = regex.compile(r" ?-{2,3} ?")
_SPACE_BEFORE_MARK = regex.compile(r"(?<=[\w\"')\]])\s+(?=[.!?,;:。！？，；：]+(?:[\"')\]]*(?:\s|$)))")
_AFTER_HAN = regex.compile(r"(?<=[\p{Han}”」』）)\"])[?!,;:](?!\d)|(?<=\p{Han})\.(?=$|[\"' ])")
_TO_WIDE = {"?": "？", "!": "！", ",": "，", ";": "；", ":": "：", ".": "。"}
_HAN_SPACES = regex.compile(r"(?<=[\p{Han}，。！？；：]) +(?=\p{Han})|(?<=\p{Han}) +(?=[，。！？；：])")
_SPACED_MARKS = "fr"  # where a space before ! ? ; : is right


def plain(text: str, code: str) -> str:
    """`text`, of the language `code`, in the form that a model is trained on: the source side, never the target.

    Quotes become straight, dashes hyphens, dots three dots, full-width letters and digits plain ones; no space before
    a final mark. Chinese keeps its full-width marks, and gets them where others were typed; elsewhere marks are plain.
    """
    spoken = language(code)
    text = text.translate(_QUOTES)
    if spoken.primary in ("zh", "ja"):
        text = text.translate(_WIDE_LETTERS)
        text = _AFTER_HAN.sub(lambda found: _TO_WIDE[found.group()], text)
        text = _HAN_SPACES.sub("", text)
    elif not text.isascii():
        text = text.translate(_WIDE_MARKS)
    if "--" in text:
        text = _DASHES.sub(" - ", text)
    if spoken.primary != _SPACED_MARKS:
        text = _SPACE_BEFORE_MARK.sub("", text)
    return " ".join(text.split())
