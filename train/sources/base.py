"""What every kind of corpus is, and what it gives."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from train.auto import AutoRepeat
from train.paths import usable_path
from translator.config import STRICT
from translator.errors import UserError

FileName = Annotated[str, pydantic.AfterValidator(usable_path)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence, its translation, and where they were read: file and line, or package and number.

    `name` and `repeat` are those of the corpus; `turned` for a pair that was read the other way round.
    """

    source: str
    target: str
    origin: str
    name: str = "text"
    repeat: int = 1
    turned: bool = False

    def turn(self) -> Pair:
        """The same pair from target to source."""
        return dataclasses.replace(self, source=self.target, target=self.source, turned=not self.turned)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Corpus(ABC):
    """One entry of a recipe's `corpora`, checked.

    `name` groups corpora whose held-out sentences are to be scored apart. `repeat` is how often training sees each of
    their pairs in an epoch; "auto" makes them about a tenth of the text.
    """

    FORM: ClassVar[str]
    """How an entry of this kind is written in a recipe, for messages."""

    _: dataclasses.KW_ONLY
    name: Annotated[str, pydantic.Field(pattern=r"^\w[\w .-]{0,39}$")] = "text"
    repeat: AutoRepeat = 1

    @classmethod
    @abstractmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """The settings that `entry` stands for when it is of this kind, unchecked; else None."""

    @abstractmethod
    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield the pairs in file order; `base` is the folder that relative paths start from.

        Raises:
            UserError: the text is missing, malformed, or not in these languages.
        """


def field(record: object, dotted: str, where: str) -> str:
    """The text under a key of a record, `a.b` for b inside a; `where` is what messages call the record.

    Raises:
        UserError: there is no such key, or what it holds is not text that UTF-8 can write.
    """
    value = record
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            held = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise UserError(f"{where}: no field {dotted!r}: {key!r} is not among: {held}")
        value = value[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: field {dotted!r} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field {dotted!r} holds half of a surrogate pair") from error
    return value
