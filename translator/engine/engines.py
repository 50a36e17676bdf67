"""What engines there are, by name, and which one a model gets."""

from collections.abc import Callable
from pathlib import Path

import torch

from translator.checkpoint import Checkpoint, is_packed, map_checkpoint, read_checkpoint
from translator.engine.base import Engine
from translator.engine.eager import EagerEngine
from translator.engine.graphs import GraphEngine
from translator.engine.native.library import available
from translator.engine.native.weights import AUTO, TYPES
from translator.engine.packed import PackedEngine
from translator.engine.prepacked import PrepackedEngine
from translator.engine.store import read_packed
from translator.errors import UserError
from translator.model import TranslationModel

COMPUTE_TYPES = (AUTO, *TYPES)
"""What weights are computed with; `auto` changes none."""
GRAPH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKED = "packed"


def _eager(model: TranslationModel, compute_type: str, threads: int | None) -> Engine:
    """Plain PyTorch, on the parameters as they are."""
    if compute_type != AUTO:
        raise UserError(
            f"compute type {compute_type}: engine eager computes in what the model's weights are; try packed"
        )
    return EagerEngine(model)


def _graphs(model: TranslationModel, compute_type: str, threads: int | None) -> Engine:
    """CUDA graphs; on a CPU the same steps, not recorded."""
    if compute_type not in (AUTO, *GRAPH_TYPES):
        raise UserError(f"compute type {compute_type}: engine graphs knows {', '.join((AUTO, *GRAPH_TYPES))}")
    return GraphEngine(model, GRAPH_TYPES.get(compute_type))


def _packed(model: TranslationModel, compute_type: str, threads: int | None) -> Engine:
    """Packed weights and native kernels; without those, PyTorch's prepacked forms."""
    if not available():
        return PrepackedEngine(model, compute_type)
    return PackedEngine(model, compute_type, threads=threads)


ENGINES: dict[str, Callable[[TranslationModel, str, int | None], Engine]] = {
    "eager": _eager,
    PACKED: _packed,
    "graphs": _graphs,
}
"""Makers of engines by name: (model, compute type, threads or None for PyTorch's)."""


def make_engine(
    model: TranslationModel, name: str = AUTO, compute_type: str = AUTO, threads: int | None = None
) -> Engine:
    """The engine `name` around `model`; `auto` is the packed one for fp32 on a CPU, and the plain one elsewhere.

    Raises `UserError` for an unknown name or compute type, and for one that the engine doesn't do.
    """
    weight = model.embedding.weight
    return ENGINES[_chosen(name, compute_type, weight.device, weight.dtype)](model, compute_type, threads)


def read_engine(
    folder: Path, device: torch.device, name: str = AUTO, compute_type: str = AUTO, threads: int | None = None
) -> tuple[Checkpoint, Engine]:
    """The checkpoint in `folder` and the engine `name` around it.

    Of a model that is packed, the packed matrices are the only ones in memory: `Checkpoint.model` has lost its own; in
    a folder of packed weights they stay in the file, which is mapped. Raises `UserError` as `read_checkpoint`,
    `read_packed` and `make_engine` do.
    """
    name = _chosen(name, compute_type, device, torch.float32)
    if is_packed(folder):
        if name != PACKED:
            raise UserError(f"{folder}: holds packed weights, which engine packed alone runs, on the CPU; not {name}")
        return read_packed(folder, compute_type, threads)
    if name != PACKED or not available():
        checkpoint = read_checkpoint(folder, device)
        return checkpoint, ENGINES[name](checkpoint.model, compute_type, threads)
    checkpoint = map_checkpoint(folder)
    try:
        return checkpoint, PackedEngine(checkpoint.model, compute_type, threads=threads, release=True)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def _chosen(name: str, compute_type: str, device: torch.device, dtype: torch.dtype) -> str:
    if compute_type not in COMPUTE_TYPES:
        raise UserError(f"unknown compute type {compute_type!r}; known: {', '.join(COMPUTE_TYPES)}")
    if name == AUTO:
        return PACKED if device.type == "cpu" and dtype == torch.float32 else "eager"
    if name not in ENGINES:
        raise UserError(f"unknown engine {name!r}; known: {', '.join((AUTO, *ENGINES))}")
    if name == PACKED and device.type != "cpu":
        raise UserError(f"engine {name} runs on the CPU, not on {device}; engine graphs is for GPUs")
    return name
