"""Memory that a training step gives back is memory that the next step asks for again."""

import ctypes
import logging
import sys

log = logging.getLogger("translator")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's malloc.h
_LARGEST = 2**31 - 1  # what mallopt's int holds


def keep_freed_memory() -> None:
    """Lets the C library keep the blocks this process frees, for the next step, instead of giving them back.

    glibc maps each block above 32 MiB anew and unmaps it when it is freed: logits, gradients and activations are then
    faulted in page by page at every step, which on two cores took a quarter of it. Nothing is done where the C library
    isn't glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, 64 << 20)):
        if not mallopt(option, value):
            log.debug("mallopt(%d, %d) was refused", option, value)
