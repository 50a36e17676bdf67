"""What a language code means: one table for filters, sentence splitter, joiner, BLEU and Chinese script conversion.

Codes are BCP 47 tags or ISO 639 codes of two or three letters, in any case, with `-` or `_`: `zh`, `ZH`, `zh_CN`,
`zho_Hans` and `cmn` are all Chinese in simplified characters. What a language needs follows from how it is written.
"""

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import langcodes
import regex  # type: ignore[import-untyped]
from langcodes.language_lists import CLDR_LANGUAGES
from pydantic import AfterValidator

from translator.errors import UserError


@dataclass(frozen=True, slots=True)
class _Writing:
    """`scripts` as Unicode names them; whether words and sentences have spaces between them; sacreBLEU's tokenizer."""

    scripts: tuple[str, ...]
    spaced: bool = True
    bleu_tokenizer: str = "13a"


_HAN = _Writing(("Han",), spaced=False, bleu_tokenizer="zh")
# By ISO 15924 script. Without spaces between words, the default tokenizer would take a sentence for one word.
_WRITINGS = {
    "Latn": _Writing(("Latin",)),  # to look its name up takes a third of a second
    **dict.fromkeys(["Hans", "Hant", "Hani"], _HAN),
    **dict.fromkeys(["Jpan", "Hrkt"], _Writing(("Han", "Hiragana", "Katakana"), spaced=False, bleu_tokenizer="char")),
    **dict.fromkeys(["Kore", "Hang"], _Writing(("Hangul",), bleu_tokenizer="char")),
    **{
        script: _Writing((name,), spaced=False, bleu_tokenizer="char")
        for script, name in (("Thai", "Thai"), ("Laoo", "Lao"), ("Khmr", "Khmer"), ("Mymr", "Myanmar"))
    },
}
# In everyday use in both scripts, whichever is the likelier.
_CYRILLIC_OR_LATIN = {"az", "bs", "sr", "uz"}


@dataclass(frozen=True, slots=True)
class Language:
    """A language as its code means it.

    tag: the code in BCP 47's own spelling, `zh-Hans` for `zho_Hans`.
    primary: the language alone, as two letters where it has a code of two, macrolanguages joined: `zh` for `cmn`.
    script: ISO 15924 code of the script named, or else of the likeliest: `Hans`, `Latn`.
    scripts: Unicode names of the scripts its text may be in; none where Unicode has no such script.
    spaced: whether sentences are joined with a space.
    bleu_tokenizer: sacreBLEU's tokenizer for it.
    """

    tag: str
    primary: str
    script: str
    scripts: tuple[str, ...]
    spaced: bool
    bleu_tokenizer: str


@lru_cache
def language(code: str) -> Language:
    """The language that `code` stands for.

    Raises:
        UserError: there is no such code; the message names near ones.
    """
    if not _is_language(code):
        raise UserError(f"unknown language code {_short(code)}; {_near(code)}")
    tag = langcodes.standardize_tag(code, macro=True)
    found = langcodes.get(tag)
    primary, script = str(found.language), str(found.maximize().script or "Latn")
    writing = _WRITINGS.get(script) or _Writing(_unicode_names(script))
    if primary in _CYRILLIC_OR_LATIN and not found.script:
        writing = _Writing(("Cyrillic", "Latin"))
    return Language(tag, primary, script, writing.scripts, writing.spaced, writing.bleu_tokenizer)


def by_code_or_name(text: str) -> Language | None:
    """The language with this code, or with this name in English or in itself; None where there is no such one."""
    code = text if _is_language(text) else _names().get(text.casefold())
    return language(code) if code else None


def _is_language(code: str) -> bool:
    try:
        found = langcodes.get(code)
    except ValueError:
        return False
    return found.is_valid() and found.language not in (None, "und", "mul", "mis", "zxx")


def _standard(code: str) -> str:
    return language(code).tag


LanguageCode = Annotated[str, AfterValidator(_standard)]
"""A setting that is a language code; kept in BCP 47's own spelling."""


def _unicode_names(script: str) -> tuple[str, ...]:
    # Everyday names of some scripts are not Unicode's, which has the ISO code as an alias; and some it lacks.
    for name in (str(langcodes.Language.make(script=script).script_name()).replace(" ", "_"), script):
        try:
            regex.compile(rf"\p{{scx={name}}}")
        except regex.error:
            continue
        return (name,)
    return ()


def _near(code: str) -> str:
    names = _names()
    folded = code[:40].casefold()
    matches = difflib.get_close_matches(folded, [*names, *CLDR_LANGUAGES], n=3, cutoff=0.75)
    near = [names[folded]] if folded in names else [names.get(match, match) for match in matches]
    if not near and (letters := re.match("[a-z]{2,3}(?![a-z])", folded)):
        # A code with something behind it, or a country's: `zh_CN.UTF-8`, `jp`.
        spoken = str(langcodes.get(f"und-{letters[0][:2]}").maximize().language)
        near = [letters[0], *([spoken] if spoken != "en" else ())]  # "en" is also the guess for no country at all
    known = dict.fromkeys(langcodes.standardize_tag(one, macro=True) for one in near if _is_language(one))
    if not known:
        return "write e.g. en, zh, pt-BR or zho_Hans"
    return "did you mean " + " or ".join(f"{one!r} ({langcodes.get(one).display_name()})" for one in known) + "?"


@lru_cache
def _names() -> dict[str, str]:
    """English and own names of the languages of CLDR, case folded, and their codes."""
    found: dict[str, str] = {}
    for code in sorted(CLDR_LANGUAGES, key=lambda code: (len(code), code)):
        known = langcodes.get(code)
        for name in (known.language_name(), known.autonym()):
            found.setdefault(name.casefold(), code)
    return found


def _short(code: str) -> str:
    return repr(code if len(code) <= 40 else code[:40] + "…")
