"""Numbers that a recipe may leave to the run."""

from typing import Annotated

from pydantic import Field, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from translator.bounds import MOST_VOCABULARY


class Auto(int):
    """What stands in Python for "auto" in a recipe: a number that the run works out from its text, see `train.fit`."""


AUTO = Auto(-1)
MOST_STEPS = 100_000_000


def _auto(value: object, check: ValidatorFunctionWrapHandler) -> int:
    return AUTO if value == "auto" or isinstance(value, Auto) else int(check(value))


def _shown(value: int) -> int | str:
    return "auto" if isinstance(value, Auto) else value


Count = Annotated[int, Field(ge=1, le=MOST_STEPS)]
AutoCount = Annotated[int, Field(ge=1, le=MOST_STEPS), WrapValidator(_auto), PlainSerializer(_shown)]
AutoSteps = Annotated[int, Field(ge=0, le=MOST_STEPS), WrapValidator(_auto), PlainSerializer(_shown)]
AutoSize = Annotated[int, Field(ge=261, le=MOST_VOCABULARY), WrapValidator(_auto), PlainSerializer(_shown)]
AutoRepeat = Annotated[int, Field(ge=1, le=100_000), WrapValidator(_auto), PlainSerializer(_shown)]
