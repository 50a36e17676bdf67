"""Where tensors live."""

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
