"""Text in and out: lines that end at a newline and nowhere else, files that are replaced whole or not at all.

`str.splitlines` and Python's text mode also break at a lone CR, U+2028, U+0085, form feeds and more. One such
character inside a sentence would shift every later pair of two aligned files, so all lines come through here.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from translator.errors import UserError

_BOM = b"\xef\xbb\xbf"
# Names of streams that the shell has opened; opening one again must not replace the file behind it.
_STREAM_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def iter_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    r"""Yield the lines of a binary stream as they arrive, without their line ends.

    A line ends at ``\n``; the ``\r`` of a ``\r\n`` goes too, and so does a byte order mark at the start.
    The last line counts whether or not it ends with a newline. `name` is what messages call the stream.

    Raises:
        UserError: a line is not valid UTF-8, or the stream cannot be read.
    """
    number = 0
    while True:
        try:
            raw = stream.readline()
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {_reason(error)}") from error
        if number == 0 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
        if not raw:
            return
        number += 1
        if raw.endswith(b"\n"):
            raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: line {number} is not valid UTF-8; convert it, e.g. with iconv -f GB18030 -t UTF-8"
            ) from error


def read_lines(path: Path) -> list[str]:
    """All lines of a file, as `iter_lines` cuts them.

    Raises:
        UserError: the file is missing, is a folder, may not be read, or is not valid UTF-8.
    """
    return list(iter_file(path))


def iter_file(path: Path) -> Iterator[str]:
    """Yield the lines of a file one by one, as `iter_lines` cuts them.

    Raises:
        UserError: as `read_lines`, when the first line is asked for or when the faulty line is reached.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from error
    with stream:
        yield from iter_lines(stream, str(path))


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    r"""A UTF-8 text file, ``\n`` line ends, that takes the place of `path` only when the block ends well.

    Until then, and after any exception, the old file is untouched. A pipe or a device is written directly.

    Raises:
        UserError: the file cannot be written (full disk, no permission, missing folder).
    """
    with (
        _output(path) as raw,
        io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="\n") as text,
    ):
        yield text
        text.flush()
        _sync(raw)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`, whole or not at all.

    Raises:
        UserError: the file cannot be written (full disk, no permission, missing folder).
    """
    with _output(path) as raw, io.BufferedWriter(raw) as stream:
        stream.write(data)
        stream.flush()
        _sync(raw)


class _OutputFile(io.FileIO):
    """A raw file whose write errors name the file the user asked for, not the temporary one."""

    def __init__(self, path: Path, mode: str, wanted: Path) -> None:
        self.wanted = wanted
        super().__init__(path, mode)

    # Converted here and not around the caller's block: an OSError of the caller's own is not about this file.
    def write(self, data: Any, /) -> int:
        with _blaming(self.wanted):
            return super().write(data)


def _sync(raw: _OutputFile) -> None:
    with _blaming(raw.wanted):
        if Path(os.fsdecode(raw.name)).is_file():  # pipes and terminals refuse fsync
            os.fsync(raw.fileno())


@contextmanager
def _output(path: Path) -> Iterator[_OutputFile]:
    """The raw file behind `path`: the thing itself if it is a stream, else a neighbour that replaces it."""
    with _blaming(path):
        is_stream = path.parent in _STREAM_FOLDERS or (path.exists() and not path.is_file())
        if is_stream:
            # Appending: `>> log` behind /dev/stdout keeps what it holds.
            raw = _OutputFile(path, "a", path)
    if is_stream:
        with raw:
            yield raw
        return
    target = Path(os.path.realpath(path))  # a symbolic link stays a link
    temporary = target.with_name(f".translator-{secrets.token_hex(8)}.tmp")
    with _blaming(path):
        raw = _OutputFile(temporary, "x", path)
    try:
        with raw:
            with _blaming(path):
                if target.exists():
                    shutil.copymode(target, temporary)
            yield raw
        with _blaming(path):
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
