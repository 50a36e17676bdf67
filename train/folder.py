"""A run's folder: whose it is, who writes in it, and how a saved step takes the place of the one before.

    run.json              the run's identity; every saved step carries it too
    last/                 a checkpoint, and beside it all that the run needs to go on
    best/                 a checkpoint, and beside it which step it is
    log.jsonl test.json   the figures; those of a run that was killed before its first save get its name in front
    .lock                 held while a training writes here; a process that dies lets go of it

All are plain files and folders: a run may be copied, packed and moved. `.last.unfinished` is being written; whole, it
is renamed to `.last.new`, then `last` to `.last.old`, `.last.new` to `last`, and `.last.old` is deleted. Wherever that
is cut off, `RunFolder` finishes it or takes it back the next time.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import Field
from pydantic.dataclasses import dataclass

from train.report import LOG
from train.state import COUNTERS, STATE, read_saved
from translator.checkpoint import CONFIG, TOKENIZER, WEIGHTS
from translator.config import STRICT, from_json, to_json
from translator.errors import UserError
from translator.textio import atomic_write_bytes

IDENTITY, LOCK, TEST = "run.json", ".lock", "test.json"
_TEMPORARY = f".translator-{'[0-9a-f]' * 16}.tmp"  # of a file that was being written
_OURS = {WEIGHTS, CONFIG, TOKENIZER, STATE, COUNTERS}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Identity:
    """What `run.json` holds: a random name that tells this run's files from those of any other, and when it began."""

    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    began: str
    format: Literal[1] = 1


class RunFolder:
    """The folder of one run, locked from construction to `close`.

    Without `resume` the folder must be new, empty, or hold a run that never saved a step. Raises `UserError` for
    another folder, for a run that is being trained by somebody else, and for what can't be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self.last, self.best = path, path / "last", path / "best"
        if resume and not (path / IDENTITY).exists():
            raise UserError(f"{path}: nothing to resume, there is no run of this program")
        with self._writing(path, "made"):
            path.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign()
        self._open = ExitStack()
        try:
            with self._writing(path, "locked"):
                self._open.enter_context(FileLock(path / LOCK, timeout=0))
            self._refuse_foreign()  # once more, now that nobody else is at it
            with self._writing(path):
                for left in path.glob(_TEMPORARY):
                    left.unlink()
            self._begin(resume)
        except Timeout:
            raise UserError(
                f"{path}: another training is writing here; wait for it to end, or name another folder with "
                "--set output=…"
            ) from None
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """Lets another training have the folder."""
        self._open.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_foreign(self) -> None:
        # What a kill leaves before `run.json` is whole isn't foreign.
        names = {entry.name for entry in self.path.iterdir() if not entry.match(_TEMPORARY)} - {LOCK}
        if names and IDENTITY not in names:
            raise UserError(
                f"{self.path}: holds {_listed(names)} and no run of this program; name a new or an empty folder with "
                "--set output=…"
            )

    def _begin(self, resume: bool) -> None:
        self.identity = ""
        if (self.path / IDENTITY).exists():
            self.identity = from_json(Identity, self.path / IDENTITY).run
            with self._writing(self.path):
                for name in ("last", "best"):
                    self._settle(name)
        saved = [place for place in (self.last, self.best) if place.exists() or place.is_symlink()]
        if resume:
            if self.last not in saved:
                raise UserError(f"{self.path}: nothing to resume, there is no saved step")
            for place in saved:
                self._check_ours(place)
            return
        if saved:
            raise UserError(f"{self.path}: holds a run already; go on with --resume, or name another with "
                            "--set output=…")  # fmt: skip
        if self.identity:
            # The run that was begun here before has no saved step any more; its figures are kept out of the new log.
            with self._writing(self.path):
                for name in (LOG, TEST):
                    if (self.path / name).is_file():
                        (self.path / name).rename(self.path / f"{self.identity[:8]}-{name}")
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        self.identity = secrets.token_hex(16)
        atomic_write_bytes(self.path / IDENTITY, to_json(Identity(run=self.identity, began=began)).encode())

    def _check_ours(self, place: Path) -> None:
        """Refuses a saved step that another run wrote, or that isn't one."""
        if place.is_symlink() or not place.is_dir():
            kind = "a symbolic link" if place.is_symlink() else "a file"
            raise UserError(f"{place}: is {kind}; a saved step of this program is a folder")
        run = read_saved(place).run
        if run != self.identity:
            raise UserError(f"{place / COUNTERS}: run = {run!r} is another run's, {IDENTITY} has {self.identity!r}")

    # -- one saved step after another --------------------------------------------------------------------------------

    @contextmanager
    def replacing(self, name: Literal["last", "best"]) -> Iterator[Path]:
        """A new folder to fill, which takes the place of `last` or `best` when the block ends well and else vanishes.

        Raises `UserError` on a full disk; what was there before is then untouched.
        """
        unfinished = self.path / f".{name}.unfinished"
        try:
            with self._writing(unfinished):
                self._settle(name)
                unfinished.mkdir()
                yield unfinished
                unfinished.rename(self.path / f".{name}.new")
            with self._writing(self.path / name):
                self._settle(name)
        finally:
            with suppress(OSError):
                _discard(unfinished)

    def keep_best(self) -> None:
        """Makes `best` what `last` is now. The weights are on the disk once, where the file system has hard links."""
        with self.replacing("best") as folder:
            for name in (WEIGHTS, CONFIG, TOKENIZER, COUNTERS):
                if name == WEIGHTS:
                    try:
                        os.link(self.last / name, folder / name)
                        continue
                    except OSError:
                        pass  # FAT, some network file systems
                # Small files are copied: an editor that writes in place would change both.
                shutil.copyfile(self.last / name, folder / name)

    def _settle(self, name: str) -> None:
        """Finishes or takes back what was cut off; afterwards there is `name`, or nothing."""
        place, fresh, old = self.path / name, self.path / f".{name}.new", self.path / f".{name}.old"
        _discard(self.path / f".{name}.unfinished")
        if fresh.is_dir():
            self._check_ours(fresh)
            if place.exists():
                _retire(old, place)
                place.rename(old)
            fresh.rename(place)
        elif old.is_dir() and not place.exists():
            old.rename(place)
        _retire(old, place)

    @contextmanager
    def _writing(self, path: Path, what: str = "written") -> Iterator[None]:
        try:
            yield
        except Timeout:  # is an OSError too
            raise
        except OSError as error:
            raise UserError(f"{path}: cannot be {what}: {error.strerror or error}") from None


def _discard(folder: Path) -> None:
    """Deletes a folder of files that this program wrote; anything else in it stays, and the folder with it."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if _is_ours(entry):
            entry.unlink()
    folder.rmdir()


def _retire(old: Path, place: Path) -> None:
    """Deletes the step that `place` took the place of; what somebody else put there moves on to `place`."""
    if not old.is_dir():
        return
    for entry in old.iterdir():
        if not _is_ours(entry):
            entry.rename(place / entry.name)
    _discard(old)


def _is_ours(entry: Path) -> bool:
    return (entry.name in _OURS or entry.match(_TEMPORARY)) and not entry.is_dir()


def _listed(names: set[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:3])
    return shown + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
