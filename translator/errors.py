"""The one exception for mistakes a user can mend, and how its message is kept readable."""

import reprlib

LONGEST_MESSAGE = 1000


class UserError(ValueError):
    """Bad input: the message is one line that names the file, line or option and says what would be right.

    The command line prints it on stderr and exits with status 2, without a traceback. A message may quote what a user
    wrote: it is made one line of at most `LONGEST_MESSAGE` characters, whatever that held.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str, most: int = LONGEST_MESSAGE) -> str:
    """`text` on one line of about `most` characters, its middle left out where it is longer.

    Characters that would steer a terminal are written as escapes.
    """
    if len(text) > most:
        # Both ends say more than the middle: the file and key stand in front, what would be right at the end.
        text = text[: most * 2 // 3] + " … " + text[-most // 3 :]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 2


def quoted(value: object) -> str:
    """The `repr` of a value for a message, in about 80 characters however large the value is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python's or PyTorch's allocator, on a CPU or a GPU, found no room; needs no PyTorch to be imported."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )
