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
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None:
        there = min(there, limit)
    if needed > there:
        raise UserError(f"{what} needs {needed / 2**30:,.1f} GiB of memory, and there are {there / 2**30:,.1f}")


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`: by the driver on a GPU, else by the system and the container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():  # counts what the system keeps of files and gives up when asked
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        there = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return there if limit is None or used is None else max(min(there, limit - used), 0)


def _number(path: str) -> int | None:
    file = Path(path)
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
