"""Where tensors live."""

import os
from pathlib import Path

import torch

from translator.errors import UserError


def usable_device(name: str) -> torch.device:
    """The device called `name`; raises `UserError` when it is unknown or not there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # "meta" makes tensors too, but holds nothing
    except (RuntimeError, AssertionError, ImportError):
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise UserError(f"device {name!r} is not there; this machine has {', '.join(there)}") from None
    return device


def check_memory(needed: int, what: str) -> None:
    """Raises `UserError` when `what` needs more bytes than this machine, or this container, has.

    An operating system promises memory that isn't there, and ends the program when it is used.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        there = min(there, int(text))
    if needed > there:
        raise UserError(f"{what} needs {needed / 2**30:,.1f} GiB of memory, and there are {there / 2**30:,.1f}")
