"""What a caller may hand over as a list of texts: never a string, which Python would take apart into letters."""

from collections.abc import Iterable
from typing import Any


def text_list(value: Iterable[str], name: str) -> list[str]:
    """`value` as a list of texts; raises `TypeError`, which says what `name` should be, for a string or other items."""
    texts = item_list(value, name)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be texts; number {number} is a {type(text).__name__}")
    return texts


def item_list(value: Iterable[Any], name: str) -> list[Any]:
    """`value` as a list; raises `TypeError` for a string, which is one text and not a list."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a list of texts, not one {type(value).__name__}: put it in a list")
    return list(value)
