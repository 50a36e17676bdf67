"""Bytes as people write and read them; questions that have no answer, answered so."""

import re
from collections.abc import Callable

from translator.errors import UserError, quoted

NOT_APPLICABLE = "not applicable"

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)}
LONGEST = 1 << 40
"""Tokens up to which a length is looked for."""


def parse_bytes(text: str, option: str) -> int:
    """Bytes of `10GiB`, `10 GB`, `13.4GB` or `1048576`; GB are 10⁹, GiB 2³⁰. Raises `UserError`."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text, flags=re.ASCII)
    if found is None or found[2].upper() not in _UNITS:
        raise UserError(f"{option} {quoted(text)}: write a size as 10GiB, 10GB or 10737418240")
    whole, _, fraction = found[1].partition(".")
    # In whole numbers, so that 13.4 GB are 13,400,000,000 and not a byte less.
    return int(whole + fraction) * _UNITS[found[2].upper()] // 10 ** len(fraction)


def sizes(count: int | None) -> tuple[str, str, str]:
    """Bytes as a plain number, in GB and in GiB, which differ by 7 %."""
    if count is None:
        return NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE
    return f"{count:,}", short(count / 1000**3), short(count / 1024**3)


def short(size: float) -> str:
    """Two places behind the point, or as many as three figures need."""
    return f"{size:,.2f}" if size >= 1 else f"{size:.3g}"


def fitting(budget: int, each: int) -> int | None:
    """How many of `each` bytes there is room for; None where one takes nothing."""
    return budget // each if each else None


def last_within(read: Callable[[int], int], limit: int) -> int | None:
    """The greatest length whose `read` bytes are at most `limit`; None where no length ever reads more.

    `read` never falls. From the next token on, a step reads more than `limit`.
    """
    if read(LONGEST) <= limit:
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if read(middle) <= limit else (low, middle)
    return low
