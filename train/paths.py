"""File names that a recipe gives."""

from translator.errors import UserError

# What the file systems of the operating systems in use allow, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def usable_path(name: str) -> str:
    """`name` as it is; raises `UserError` where no file can have it: empty, too long or with a NUL in it."""
    if not name.strip():
        raise UserError("the name of a file or folder is missing")
    if "\0" in name:
        raise UserError(f"{name!r} cannot be the name of a file: it holds a NUL")
    if len(name.encode(errors="replace")) > _LONGEST_PATH or any(
        len(part.encode(errors="replace")) > _LONGEST_NAME for part in name.split("/")
    ):
        raise UserError(f"{name[:60]!r}… cannot be the name of a file: it is longer than {_LONGEST_NAME} bytes")
    return name
