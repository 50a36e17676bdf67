"""Packed weights in a file: mapped and not read, so that all processes of a machine share one copy in memory.

A folder with `config.json`, `tokenizer.model` and `packed.safetensors`, which holds a block of bytes for each product
and, as tensors, what the engine reads beside them: embeddings, norms, positions. Blocks lie on 64 bytes. The form is
the same for all instruction sets, so that the folder goes from one machine to another.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from safetensors import safe_open
from torch import Tensor

from translator.attention import Product
from translator.checkpoint import (
    CONFIG,
    PACKED_WEIGHTS,
    TOKENIZER,
    Checkpoint,
    CheckpointConfig,
    check_fits,
    opened,
    read_around,
    read_tensor,
    shape_of,
)
from translator.config import STRICT, to_json
from translator.engine.native.library import FORM, load, missing
from translator.engine.native.weights import ALIGNMENT, AUTO, TYPES, PackedWeights, block_sizes, chosen_type
from translator.engine.packed import PackedEngine
from translator.errors import UserError
from translator.model import TranslationModel
from translator.textio import atomic_write_bytes

BLOCK = "packed."  # stands before a product's name in the file
TABLE = "embedding.weight"
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PackedForm:
    """How weights were packed, and a checksum of them."""

    compute_type: Literal[tuple(TYPES)]  # type: ignore[valid-type]
    form: int
    checksum: str


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PackedConfig(CheckpointConfig):
    """What `config.json` holds beside packed weights."""

    packed: PackedForm


def write_packed(folder: Path, checkpoint: Checkpoint, compute_type: str) -> None:
    """Packs the model and writes the three files into an existing folder.

    Raises `UserError` without native kernels, for weights that aren't finite in that type, and when the disk is full.
    """
    model = checkpoint.model
    products = model.products()
    weights = PackedWeights.pack(load(), products, chosen_type(compute_type, products))
    tensors = {BLOCK + name: block for name, block in weights.blocks.items()}
    state = model.state_dict()
    for name in _beside(model, products):
        tensors[name] = state[name].detach().float().contiguous()
    tensors[TABLE] = _narrowest(tensors[TABLE])
    config = checkpoint.config
    packed = PackedConfig(
        source_language=config.source_language,
        target_language=config.target_language,
        model=config.model,
        decode=config.decode,
        packed=PackedForm(compute_type=weights.compute_type, form=FORM, checksum=_checksum(tensors)),
    )
    atomic_write_bytes(folder / PACKED_WEIGHTS, _laid_out(tensors))
    atomic_write_bytes(folder / CONFIG, to_json(packed).encode())
    atomic_write_bytes(folder / TOKENIZER, checkpoint.tokenizer.model)


def read_packed(folder: Path, compute_type: str = AUTO, threads: int | None = None) -> tuple[Checkpoint, PackedEngine]:
    """The checkpoint in a folder of `write_packed`, and the engine on its weights where the file has them.

    The checksum is compared each time: nothing else would show a changed bit of whole numbers, and what it reads, the
    first token needs as well. Raises `UserError` for another compute type than they were packed in, another form, files
    that don't fit each other or are damaged, and without native kernels.
    """
    check_kernels(str(folder))
    config, tokenizer = read_around(folder, PackedConfig)
    made = config.packed
    if made.form != FORM:
        raise UserError(f"{folder / CONFIG}: packed.form = {made.form}: this program reads form {FORM}; export it anew")
    if compute_type not in (AUTO, made.compute_type):
        raise UserError(f"{folder}: is packed as {made.compute_type}, and --compute-type asks for {compute_type}")
    path = folder / PACKED_WEIGHTS
    with opened(path) as tensors:
        model = shape_of(config.model, tensors, path)
        products = model.products()
        found = _read(tensors, model, products, made.compute_type, path)
    if _checksum(found) != made.checksum:
        raise UserError(f"{path}: isn't what was written, its checksum is another; export it anew")
    weights = PackedWeights({name: found.pop(BLOCK + name) for name in products}, products, made.compute_type)
    table = found[TABLE]
    model.make_buffers()
    model.load_state_dict(found, strict=False, assign=True)
    model.eval().requires_grad_(False)
    return Checkpoint(model, tokenizer, config), PackedEngine.of_packed(model, weights, table, threads=threads)


def check_kernels(where: str) -> None:
    """Raises `UserError`, which begins with `where`, unless there are native kernels."""
    if (reason := missing()) is not None:
        raise UserError(f"{where}: packed weights are for the native kernels, and there are none: {reason}")


def _read(
    tensors: safe_open, model: TranslationModel, products: Mapping[str, Product], compute_type: str, path: Path
) -> dict[str, Tensor]:
    """All tensors of the file, in its order and as they are mapped."""
    sizes, state = block_sizes(load(), products, compute_type), model.state_dict()
    wanted = {BLOCK + name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()}
    wanted |= {name: state[name] for name in _beside(model, products)}
    check_fits(wanted, tensors, path)
    found = {name: read_tensor(tensors, name, path) for name in wanted}
    for name, tensor in found.items():
        if name.startswith(BLOCK) and tensor.data_ptr() % ALIGNMENT:
            raise UserError(f"{path}: tensor {name!r} doesn't lie on {ALIGNMENT} bytes; export it anew")
    return found


def _beside(model: TranslationModel, products: Mapping[str, Product]) -> Iterator[str]:
    """Names of the tensors that no product has, in order, and of the embeddings, which are also looked up."""
    packed = {id(_whole(tensor)) for product in products.values() for tensor in product if tensor is not None}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name == TABLE or id(_whole(tensor)) not in packed:
            yield name


def _whole(tensor: Tensor) -> Tensor:
    """What a tensor is a part of."""
    return tensor if tensor._base is None else tensor._base


def _narrowest(table: Tensor) -> Tensor:
    return table.to(getattr(torch, chosen_type(AUTO, {"": (table, None)})))


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b of names, types and bytes: of all that the file holds."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name} {_TYPES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _laid_out(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file with its tensors in this order; the library's own order would put blocks anywhere."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())])
