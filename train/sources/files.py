"""Text files of a corpus, packed or not."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from translator.errors import UserError
from translator.textio import iter_file, iter_lines

_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, as `translator.textio` cuts them; .gz, .xz and .bz2 are unpacked on the way.

    Raises:
        UserError: the file is missing, may not be read, is not packed as its name says, or is not valid UTF-8.
    """
    if path.suffix.lower() not in _PACKED:
        yield from iter_file(path)
        return
    with opened(path) as stream:
        yield from iter_lines(stream, str(path))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked on the way.

    Raises:
        UserError: the file is missing, may not be read, or is not packed as its name says.
    """
    unpack = _PACKED.get(path.suffix.lower(), open)
    try:
        with unpack(path, "rb") as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole {path.suffix} file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def text_suffix(name: str) -> str:
    """The kind of text in a file by its name, in lower case: `.csv` for `mine.CSV` and `mine.csv.gz`."""
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in _PACKED else path).suffix.lower()
