"""Which training pairs are dropped, and the account of it: every filter says how many it took.

The text itself is never changed, except that blanks around it go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated

import pydantic
import regex  # type: ignore[import-untyped]

from train.sources import Pair
from translator.config import STRICT
from translator.errors import UserError
from translator.languages import language
from translator.typed.visible import visible

Account = list[tuple[str, int]]
_Drops = Callable[[Pair], bool]

# Scripts that put no spaces between words. A character of the first is about a word; the second need several.
_CHARACTER_IS_WORD = regex.compile(r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]")
_SPACELESS_ALPHABET = regex.compile(r"[\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]{1,4}")
SAMPLES = 3
# Below this many units, one word more or less makes any ratio.
_RATIO_FROM = 10


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class FilterConfig:
    """Limits for training pairs.

    max_characters: the most characters a side may have.
    max_length_ratio: how many times as long as the other a side may be, in words (a Chinese or Japanese
        character counts as one); pairs with no side above 10 words are not judged.
    target_script: the script of at least half of the target's letters: "auto" (by the target language),
        "any", or Unicode scripts such as "Han", "Latin", "Cyrillic Latin" (either).
    drop_duplicates: keep only the first of equal pairs.
    drop_copies: drop pairs whose two sides are the same, unless both languages are.

    Raises:
        pydantic.ValidationError: a value is out of range or of another type, or a script does not exist.
    """

    max_characters: Annotated[int, pydantic.Field(gt=0, le=10**9)] = 400
    max_length_ratio: Annotated[float, pydantic.Field(ge=1, le=1e9, allow_inf_nan=False)] = 4.0
    target_script: str = "auto"
    drop_duplicates: bool = True
    drop_copies: bool = True

    @pydantic.field_validator("target_script")
    @classmethod
    def _script_exists(cls, name: str) -> str:
        if name not in ("auto", "any"):
            _letters_of(name)
        return name


def filter_pairs(
    train: Iterable[Pair],
    held_out: Iterable[Pair],
    config: FilterConfig,
    source_language: str,
    target_language: str,
    samples: dict[str, list[Pair]] | None = None,
) -> tuple[list[Pair], Account]:
    """The pairs to train on, and for each filter in its fixed order how many pairs it dropped.

    A pair counts for the first filter that drops it. `held_out` is dev and test together: a pair goes when
    either of its sides is a sentence of theirs, whatever the case of its letters. `samples` receives the first few
    pairs that each filter dropped.
    """
    filters = _filters(held_out, config, source_language, target_language)
    dropped = dict.fromkeys((name for name, _ in filters), 0)
    kept = []
    for raw in train:
        pair = replace(raw, source=raw.source.strip(), target=raw.target.strip())
        for name, drops in filters:
            if drops(pair):
                dropped[name] += 1
                if samples is not None and dropped[name] <= SAMPLES:
                    samples.setdefault(name, []).append(pair)
                break
        else:
            kept.append(pair)
    return kept, list(dropped.items())


def account_lines(account: Account, kept: int) -> list[str]:
    """The account as lines to print: pairs read, what each filter dropped, pairs kept."""
    read = kept + sum(count for _, count in account)
    rows = [("pairs read", read), *((f"- {name}", count) for name, count in account), ("pairs kept", kept)]
    names, counts = max(len(name) for name, _ in rows), len(f"{read:,}")
    return [f"{name:<{names}}  {count:>{counts},}" for name, count in rows]


def length_in_words(text: str) -> int:
    """Words in a text of any script: by spaces where there are some, by characters where there are none."""
    without, characters = _CHARACTER_IS_WORD.subn(" ", text)
    without, groups = _SPACELESS_ALPHABET.subn(" ", without)
    # Punctuation that stands alone (always so between Chinese characters) is no word.
    return characters + groups + sum(any(map(str.isalnum, word)) for word in without.split())


def _filters(
    held_out: Iterable[Pair], config: FilterConfig, source_language: str, target_language: str
) -> list[tuple[str, _Drops]]:
    limit = config.max_characters
    filters: list[tuple[str, _Drops]] = [
        ("a side is blank", lambda pair: not pair.source or not pair.target),
        (f"longer than {limit} characters", lambda pair: max(len(pair.source), len(pair.target)) > limit),
        (f"length ratio above {config.max_length_ratio:g}", _unequal(config.max_length_ratio)),
    ]
    script = config.target_script
    if script == "auto":
        script = " ".join(language(target_language).scripts) or "any"
    if script != "any":
        filters.append((f"target not in {script.replace(' ', '/')} script", _foreign(script)))
    if config.drop_copies and language(source_language).primary != language(target_language).primary:
        filters.append(("target copies source", lambda pair: folded(pair.source) == folded(pair.target)))
    filters.append(("sentence is in dev or test", _overlaps(held_out)))
    if config.drop_duplicates:
        filters.append(("duplicate", _repeats()))
    return filters


def _unequal(ratio: float) -> _Drops:
    def drops(pair: Pair) -> bool:
        shorter, longer = sorted((length_in_words(pair.source), length_in_words(pair.target)))
        return longer > _RATIO_FROM and longer > ratio * shorter

    return drops


def _foreign(scripts: str) -> _Drops:
    own = _letters_of(scripts)
    others = regex.compile(rf"(?:(?!{own.pattern})\p{{L}})+")

    def drops(pair: Pair) -> bool:
        # In words, not letters: a name in Latin letters does not make a Chinese sentence foreign.
        mine = length_in_words(" ".join(own.findall(pair.target)))
        return mine < length_in_words(" ".join(others.findall(pair.target)))

    return drops


def _overlaps(held_out: Iterable[Pair]) -> _Drops:
    held = list(held_out)
    sources = {folded(pair.source) for pair in held}
    targets = {folded(pair.target) for pair in held}
    return lambda pair: folded(pair.source) in sources or folded(pair.target) in targets


def _repeats() -> _Drops:
    seen: set[tuple[str, str]] = set()

    def drops(pair: Pair) -> bool:
        sides = (pair.source, pair.target)
        if sides in seen:
            return True
        seen.add(sides)
        return False

    return drops


def _letters_of(scripts: str) -> regex.Pattern[str]:
    # Script extensions: a mark that two scripts share, as the long-vowel sign of both kana, belongs to each.
    names = "".join(rf"\p{{scx={name}}}" for name in scripts.split())
    try:
        return regex.compile(rf"(?:(?=\p{{L}})[{names}])+")
    except regex.error as error:
        raise UserError(
            "no such script; valid: 'auto', 'any' or Unicode scripts such as 'Han', 'Latin', 'Cyrillic Latin'"
        ) from error


def folded(text: str) -> str:
    """`text` as two sentences are compared: without regard to case, blanks around, and what nobody sees."""
    return visible(text).strip().casefold()
