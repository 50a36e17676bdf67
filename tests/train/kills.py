"""Kills a run before each of its file operations in turn, resumes it, and compares with a run never interrupted.

Usage: python -m tests.train.kills FOLDER FIRST STRIDE     whole runs; prints the last point and how many were tried
       python -m tests.train.kills FOLDER swap             only how one saved step replaces another, at every point
       python -m tests.train.kills FOLDER full             the same at every third, on a disk that is full from there on

One process imports everything and forks for each life: it trains nothing itself, so no thread is lost in a fork.
"""

import errno
import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.copy_task import write_copy_task
from tests.train.runs import same_run
from train.folder import RunFolder
from train.run import run_recipe
from train.state import COUNTERS
from translator import textio
from translator.errors import UserError

SETTINGS = ["training.max_steps=4", "training.save_every=1", "evaluation.every=2", "evaluation.sentences=2"]
REFUSED = 2
NEW = b"\n"  # what tells the new counters from the old
CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod"}


def die() -> None:
    """No handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_is_full() -> None:
    """What every operation meets that needs room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill_at(point: int, run: Path, end: Callable[[], None] = die) -> None:
    """From now on counts the operations that change something in `run`, and calls `end` after `point` of them."""
    done = 0

    def count() -> bool:
        nonlocal done
        done += 1
        if done > point:
            end()
        return done == point

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        removing = event in ("os.remove", "os.rmdir") and end is disk_is_full  # needs no room
        if (writing or (event in CHANGING and not removing)) and os.fspath(arguments[0]).startswith(str(run)):
            count()

    fsync, write = os.fsync, textio._OutputFile.write

    def synced(file: int) -> None:
        count()
        fsync(file)

    def written(self: Any, data: Any, /) -> int:
        if count():  # the next operation is the kill: half of this is on the disk by then
            return write(self, memoryview(data).cast("B")[: len(data) // 2])
        return write(self, data)

    os.fsync = synced
    textio._OutputFile.write = written  # type: ignore[method-assign]
    sys.addaudithook(hook)


def in_a_fork(life: Callable[[], object]) -> int:
    """Runs `life` in a process of its own; returns its exit status, -9 when it was killed."""
    process = os.fork()
    if not process:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            life()
            status = 0
        except SystemExit as asked:
            status = int(asked.code or 0)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed(recipe: Path, point: int, run: Path) -> None:
    """A run that dies at `point`, if it has so many."""
    kill_at(point, run)
    run_recipe(str(recipe), SETTINGS)


@contextmanager
def refused_disk() -> Iterator[None]:
    """Ends with `REFUSED` when a full disk was said to be one, in one line."""
    try:
        yield
    except UserError as error:
        assert os.strerror(errno.ENOSPC) in str(error)
        os._exit(REFUSED)


def go_on(recipe: Path) -> None:
    """What a user does after a crash: resumes, and begins again where there is nothing to resume."""
    torch.set_num_threads(1)
    try:
        run_recipe(str(recipe), SETTINGS, resume=True)
    except UserError as error:
        if "nothing to resume" not in str(error):
            raise
        run_recipe(str(recipe), SETTINGS)


def main(folder: Path, first: int, stride: int) -> None:
    """Tries every `stride`th point from `first` on."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports what would else take two seconds of each life
    whole = write_copy_task(folder, "whole")
    assert in_a_fork(lambda: run_recipe(str(whole), SETTINGS)) == 0
    point, tried = first, 0
    while True:
        name = f"killed{point}"
        recipe = write_copy_task(folder, name)

        ended = in_a_fork(partial(killed, recipe, point, folder / name))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL, f"point {point}: ended with {ended}"
        assert in_a_fork(partial(go_on, recipe)) == 0, f"point {point}: could not go on"
        assert in_a_fork(partial(same_run, folder / "whole", folder / name)) == 0, f"point {point}: differs"
        point, tried = point + stride, tried + 1
    print(point - stride, tried)


def swap(folder: Path, end: Callable[[], None]) -> None:
    """Replaces `last` and then `best`; afterwards each must be the old or the new one, whole, and nothing else left."""
    torch.set_num_threads(1)
    recipe = write_copy_task(folder, "whole")
    assert in_a_fork(lambda: run_recipe(str(recipe), ["training.max_steps=1"])) == 0

    def replace(run: Path, point: int) -> None:
        kill_at(point, run, end)
        with refused_disk(), RunFolder(run, resume=True) as held:
            with held.replacing("last") as fresh:
                for file in held.last.iterdir():
                    textio.atomic_write_bytes(fresh / file.name, file.read_bytes() + NEW * (file.name == COUNTERS))
            held.keep_best()

    def check(run: Path) -> None:
        with RunFolder(run, resume=True):
            assert {path.name for path in run.iterdir()} == {path.name for path in (folder / "whole").iterdir()}
        for place in ("last", "best"):
            old = {file.name: file.read_bytes() for file in (folder / "whole" / place).iterdir()}
            found = {file.name: file.read_bytes() for file in (run / place).iterdir()}
            assert found in (old, old | {COUNTERS: old[COUNTERS] + NEW}), place

    for point in itertools.count(step=1 if end is die else 3):
        run = Path(shutil.copytree(folder / "whole", folder / f"swap{point}"))
        ended = in_a_fork(partial(replace, run, point))
        check(run)  # reads files only, so it may do so here
        if ended == 0:
            break
        assert ended == (-signal.SIGKILL if end is die else REFUSED), f"point {point}: ended with {ended}"
        shutil.rmtree(run)
    print(point, point)


if __name__ == "__main__":
    if sys.argv[2] in ("swap", "full"):
        swap(Path(sys.argv[1]), die if sys.argv[2] == "swap" else disk_is_full)
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
