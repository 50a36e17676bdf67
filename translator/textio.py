"""Text in and out: lines that end at a newline and nowhere else, files that are replaced whole or not at all.

`str.splitlines` and Python's text mode also break at a lone CR, U+2028, U+0085, form feeds and more. One such
character inside a sentence would shift every later pair of two aligned files, so all lines come through here.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from translator.errors import UserError

LONGEST_LINE = 16 << 20  # bytes; a stream without line ends must not fill the memory


class ReaderGone(UserError):
    """Whoever read what is written has gone; that isn't a mistake, but there is no point in going on."""


_BOM = b"\xef\xbb\xbf"
# Names of streams that the shell has opened; opening one again must not replace the file behind it.
_STREAM_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def iter_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    r"""Yield the lines of a binary stream as they arrive, without their line ends.

    A line ends at ``\n``; the ``\r`` of a ``\r\n`` goes too, and so does a byte order mark at the start.
    The last line counts whether or not it ends with a newline. `name` is what messages call the stream.

    Raises:
        UserError: a line is not valid UTF-8 or longer than `LONGEST_LINE` bytes, or the stream cannot be read.
    """
    number = 0
    while True:
        try:
            raw = stream.readline(LONGEST_LINE + 1)
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {_reason(error)}") from error
        if len(raw) > LONGEST_LINE and not raw.endswith(b"\n"):
            raise UserError(
                f"{name}: line {number + 1} is longer than {LONGEST_LINE >> 20} MiB; break it into lines of sentences"
            )
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


def read_limited(path: Path, most: int) -> bytes:
    """All bytes of an ordinary file of at most `most` bytes; never waits for a pipe and reads no endless device.

    Raises:
        UserError: the file is missing, is no ordinary file, is larger, or may not be read.
    """
    check_file(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from error
    if len(data) > most:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes are too many; at most {most:,} are read")
    return data


def check_file(path: Path) -> None:
    """Raises `UserError` unless `path` leads to an ordinary file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a zero byte in a name is a ValueError
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a folder, and a file is needed")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is a pipe or a device, and an ordinary file is needed")


def json_text(value: object, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """`value` as JSON that every reader takes: characters as they are, no NaN and no infinity.

    Raises:
        UserError: a number in it is not finite.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, sort_keys=sort_keys)
    except ValueError:
        raise UserError("a figure to be written is NaN or infinite, which JSON cannot hold") from None


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


def check_writable(path: Path) -> None:
    """Finds out before any work whether a file can be written at `path`; changes nothing.

    Raises:
        UserError: it cannot (missing folder, a folder in its place, read-only, no permission, name too long).
    """
    with _blaming(path):
        if _is_stream(path):
            return
        target = Path(os.path.realpath(path))
        _check_target(path, target)
        temporary = _temporary(target)
        try:
            temporary.open("x").close()
        finally:
            temporary.unlink(missing_ok=True)


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
        is_stream = _is_stream(path)
        if is_stream:
            # Appending: `>> log` behind /dev/stdout keeps what it holds.
            raw = _OutputFile(path, "a", path)
    if is_stream:
        with raw:
            yield raw
        return
    with _blaming(path):
        target = Path(os.path.realpath(path))  # a symbolic link stays a link
        _check_target(path, target)
        _sweep(target.parent)
        temporary = _temporary(target)
        raw = _OutputFile(temporary, "x", path)
    try:
        with raw, _locked(raw):
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
def _locked(raw: _OutputFile) -> Iterator[None]:
    """Tells `_sweep` that the file's writer lives, until the block ends, even when `raw` is closed before."""
    with _blaming(raw.wanted):
        keeper = os.dup(raw.fileno())
    try:
        with suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(keeper, fcntl.LOCK_SH)
        yield
    finally:
        os.close(keeper)


def _is_stream(path: Path) -> bool:
    return path.parent in _STREAM_FOLDERS or (path.exists() and not path.is_file() and not path.is_dir())


def _check_target(path: Path, target: Path) -> None:
    """Raises what opening `target` itself for writing would; the superuser's open() would not mind a read-only file."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not (target.stat().st_mode & _ANY_WRITE and os.access(target, os.W_OK)):
        raise UserError(f"{path}: is read-only; make it writable or name another file")


_ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_TEMPORARY = ".translator-{}.tmp"
_UNLOCKED_FOR = 60.0  # seconds in which a writer has surely locked what it made


def _temporary(target: Path) -> Path:
    return target.with_name(_TEMPORARY.format(secrets.token_hex(8)))


def _sweep(folder: Path) -> None:
    """Deletes what writers that were killed have left in `folder`: whoever lives holds a lock on its file."""
    for left in folder.glob(_TEMPORARY.format("*")):
        try:
            with left.open("rb") as stream:
                if time.time() - left.stat().st_mtime > _UNLOCKED_FOR:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
        except OSError:
            continue  # locked, or already gone, or another user's


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except BrokenPipeError as error:
        raise ReaderGone(f"{path}: its reader has gone") from error
    except (OSError, ValueError) as error:  # a zero byte in a name is a ValueError
        raise UserError(f"{path}: cannot be written: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
