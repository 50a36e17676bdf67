"""Lines to sentences the model can take, what is to be decoded for them, and tokens back to lines."""

import dataclasses
from functools import lru_cache

import regex  # type: ignore[import-untyped]

from translator.errors import UserError
from translator.search import Hypothesis
from translator.search.rules import LONGEST_LOOP
from translator.tokenizer import Tokenizer
from translator.typed.sides import Source


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """What to search for: a source's ids, the target ids that are forced, and what the search `found`, best first.

    `key` is the line and the place in it where it stands first: messages name the line, samples are drawn by both.
    `slots` are the placeholders that its translation has to hold, each as often as here; None where that is all one.
    """

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    key: tuple[int, int]
    slots: str | None = None
    found: list[Hypothesis] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Piece:
    """One sentence of a line, as it was typed and as the model takes it.

    `marker` goes before its translation as it is; sentences that are equal to the model may share a task.
    """

    marker: str
    text: str
    source: Source
    task: Task


def fitted(tokenizer: Tokenizer, source: Source, limit: int) -> tuple[Source, list[int], int]:
    """What of `source` fits into `limit` tokens, end token included, its ids, and the whole's tokens."""
    ids = tokenizer.encode(source.text)
    whole = len(ids) + 1
    if whole > limit:
        text, ids = _cut(tokenizer, ids, limit - 1)
        source = source.cut(text)
    return source, [*ids, tokenizer.eos_id], whole


def _cut(tokenizer: Tokenizer, ids: list[int], most: int) -> tuple[str, list[int]]:
    """The text of the first `most` ids, less half a character at its end, and the ids of that text."""
    while True:
        text = tokenizer.decode(ids[:most]).rstrip("\ufffd")
        again = tokenizer.encode(text)
        if len(again) <= most:
            return text, again
        ids = again
        most -= 1


def one_line(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` without line ends: bytes may spell one, and one line in is one line out."""
    return tokenizer.decode(ids).replace("\r", " ").replace("\n", " ").strip()


def goes_on_and_on(text: str, most: int) -> bool:
    """Whether one to four characters, or words, stand in `text` more than `most` times in a row.

    Tokens don't show it: of `哈` and `哈哈` neither needs to be repeated.
    """
    letters, words = _in_a_row(most)
    return bool(letters.search(text.replace(" ", "")) or words.search(text))


@lru_cache
def _in_a_row(most: int) -> tuple["regex.Pattern[str]", "regex.Pattern[str]"]:
    return (
        regex.compile(rf"([\p{{L}}\p{{N}}]{{1,{LONGEST_LOOP}}}?)\1{{{most},}}"),
        regex.compile(rf"(?<!\S)(\S+(?: \S+){{0,{LONGEST_LOOP - 1}}}?)(?: \1){{{most},}}(?!\S)"),
    )


def check_text(number: int, *texts: str) -> None:
    """Raises `UserError` for half a surrogate pair, which is what Python makes of a byte that is no UTF-8."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"line {number} is not valid UTF-8") from None
