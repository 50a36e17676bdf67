"""Text files of a corpus, packed or not."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from translator.errors import UserError
from translator.textio import iter_file, iter_lines

_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, as `translator.textio` cuts them; .gz, .xz and .bz2 are unpacked on the way.

    Raises:
        UserError: the file is missing, may not be read, is not packed as its name says, or is not valid UTF-8.
    """
    unpack = _PACKED.get(path.suffix.lower())
    if unpack is None:
        yield from iter_file(path)
        return
    try:
        with unpack(path, "rb") as stream:
            yield from iter_lines(stream, str(path))
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole {path.suffix} file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def text_suffix(name: str) -> str:
    """The kind of text in a file by its name, in lower case: `.csv` for `mine.CSV` and `mine.csv.gz`."""
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in _PACKED else path).suffix.lower()
