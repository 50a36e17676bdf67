"""This program's own packed weights: a folder that loads without packing, and that processes share in memory.

For `translator translate`, `evaluate` and `score` with `--checkpoint`; training, checking and other formats need the
weights themselves.
"""

from collections.abc import Callable
from pathlib import Path

from translator.checkpoint import Checkpoint
from translator.engine.store import check_kernels, write_packed


def prepare(checkpoint: Checkpoint, compute_type: str) -> Callable[[Path], None]:
    """What saves `checkpoint` into a folder, packed as `compute_type`; raises `UserError` without native kernels."""
    check_kernels("--to packed")
    return lambda folder: write_packed(folder, checkpoint, compute_type)
