"""Damages the files that resuming reads, at random, and resumes under a limit of time and memory.

Usage: python -m tests.train.mutations FOLDER COUNT     prints how many were refused in one line and how many went on.
"""

import random
import resource
import shutil
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from tests.copy_task import write_copy_task
from tests.train.kills import REFUSED, in_a_fork
from train.run import run_recipe
from translator.errors import UserError

FILES = ("last/training.json", "last/training.safetensors", "run.json", "log.jsonl", "best/training.json")
SETTINGS = ["training.max_steps=2", "split.test=[]"]
SECONDS, BYTES = 60, 1 << 30


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One thing that goes wrong with a file, or that somebody does to it."""
    at = draw.randrange(len(data))
    end = min(len(data), at + draw.choice((1, 4, 64)))
    if data[:1] != b"{" and draw.random() < 0.7:
        at = draw.randrange(min(len(data), 9000))  # the header: there is most to go wrong
        end = at + 1
    kinds = {
        "flip": lambda: data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
        "cut": lambda: data[:at],
        "drop": lambda: data[:at] + data[end:],
        "twice": lambda: data[:end] + data[at:],
        "noise": lambda: data[:at] + draw.randbytes(end - at) + data[end:],
        "digit": lambda: data[:at] + draw.choice((b"9" * 30, b"-1", b"1e999", b"null", b"[[[[", b'""')) + data[end:],
        "zeros": lambda: data[:at] + bytes(end - at) + data[end:],
    }
    return kinds[draw.choice(sorted(kinds))]()


def resume(recipe: Path, run: Path) -> None:
    """Resumes; a refusal must be one readable line."""
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)
    signal.alarm(SECONDS)
    try:
        run_recipe(str(recipe), [*SETTINGS, f"output={run}"], resume=True)
    except UserError as error:
        assert len(str(error)) < 2000 and str(run) in str(error), str(error)
        sys.exit(REFUSED)


def main(folder: Path, count: int) -> None:
    """Tries `count` damages."""
    torch.optim.AdamW([torch.zeros(1)])  # imports what would else be imported in each child
    recipe = write_copy_task(folder, "whole")
    assert in_a_fork(partial(run_recipe, str(recipe), SETTINGS)) == 0
    ends: Counter[int] = Counter()
    for seed in range(count):
        draw = random.Random(seed)
        run = Path(shutil.copytree(folder / "whole", folder / "damaged"))
        name = FILES[seed % len(FILES)]
        (run / name).write_bytes(damaged((run / name).read_bytes(), draw))
        ended = in_a_fork(partial(resume, recipe, run))
        assert ended in (0, REFUSED), f"damage {seed} of {name}: ended with {ended}"
        ends[ended] += 1
        shutil.rmtree(run)
    print(ends[REFUSED], ends[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
