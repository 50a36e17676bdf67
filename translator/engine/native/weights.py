"""Weights in the form the native kernels read: packed once, in one block of memory."""

import ctypes
import mmap
import sys
from collections.abc import Mapping
from ctypes import c_size_t, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from translator.attention import Product
from translator.engine.native.library import BFLOAT16, FLOAT16, FLOAT32, INT8, Kernels
from translator.errors import UserError

ALIGNMENT = 64
AUTO = "auto"
TYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8}
SOURCES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class PackedProduct(NamedTuple):
    """A weight `(N, K)` with its bias at `address`, as `tr_pack` writes it."""

    address: int
    type: int
    N: int
    K: int


class PackedWeights:
    """Products by name, packed as `compute_type`; shared by all threads, never written again."""

    def __init__(self, blocks: Mapping[str, Tensor], products: Mapping[str, Product], compute_type: str) -> None:
        """`blocks` are bytes on 64-byte addresses, as `tr_pack` writes them; of `products` the shapes are read."""
        self.blocks = dict(blocks)
        self.products = {
            name: PackedProduct(self.blocks[name].data_ptr(), TYPES[compute_type], *weight.shape)
            for name, (weight, _) in products.items()
        }
        self.compute_type = compute_type

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(block.nbytes for block in self.blocks.values())

    @classmethod
    def pack(
        cls, library: Kernels, products: Mapping[str, Product], compute_type: str, *, spent: bool = False
    ) -> "PackedWeights":
        """From weights `(N, K)` and biases `(N,)`; raises `UserError` for a weight that isn't finite in that type.

        With `spent` nobody reads the weights again: what is mapped of their file goes out of memory one by one.
        """
        sizes = block_sizes(library, products, compute_type)
        room = torch.empty(sum(sizes.values()) + ALIGNMENT, dtype=torch.uint8)
        start, blocks = -room.data_ptr() % ALIGNMENT, {}
        last_use = {weight.untyped_storage().data_ptr(): name for name, (weight, _) in products.items()}
        for name, (weight, bias) in products.items():
            blocks[name] = block = room[start : start + sizes[name]]
            block[-ALIGNMENT:] = 0  # what fills it up is nothing from elsewhere in memory
            _pack(library, TYPES[compute_type], name, weight, bias, block.data_ptr())
            start += sizes[name]
            if spent and last_use[weight.untyped_storage().data_ptr()] == name:
                _let_go(weight.untyped_storage())
        return cls(blocks, products, compute_type)


def _let_go(storage: torch.UntypedStorage) -> None:
    """Takes the whole pages of a storage that nobody reads again out of this process's memory."""
    if sys.platform == "linux":
        page = mmap.PAGESIZE
        start, end = -(-storage.data_ptr() // page) * page, (storage.data_ptr() + storage.nbytes()) // page * page
        if end > start:
            ctypes.CDLL(None).madvise(c_void_p(start), c_size_t(end - start), mmap.MADV_DONTNEED)


def block_sizes(library: Kernels, products: Mapping[str, Product], compute_type: str) -> dict[str, int]:
    """Bytes of each product's block, filled up so that the next one lies on 64 bytes too."""
    type_ = TYPES[compute_type]
    return {name: _aligned(library.packed_bytes(type_, *weight.shape)) for name, (weight, _) in products.items()}


def _pack(library: Kernels, type_: int, name: str, weight: Tensor, bias: Tensor | None, address: int) -> None:
    weight = weight.detach().cpu().contiguous()
    if weight.dtype not in SOURCES:
        weight = weight.float()
    if bias is not None:
        bias = bias.detach().cpu().float().contiguous()
    source = TYPES[SOURCES[weight.dtype]]
    bias_address = None if bias is None else bias.data_ptr()
    if library.pack(type_, *weight.shape, weight.data_ptr(), source, bias_address, address):
        raise UserError(f"weight {name}: holds a number that is not finite, or too large for the compute type")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def chosen_type(compute_type: str, products: Mapping[str, Product]) -> str:
    """What `auto` stands for: the narrowest float type in which every weight is what it was; else `compute_type`.

    Nothing is lost by it, and half the bytes are read for each token. Raises `UserError` for an unknown type.
    """
    if compute_type not in (AUTO, *TYPES):
        raise UserError(f"unknown compute type {compute_type!r}; known: {', '.join((AUTO, *TYPES))}")
    if compute_type != AUTO:
        return compute_type
    weights = [weight for weight, _ in products.values()]
    for dtype in (torch.float16, torch.bfloat16):
        if all(weight.dtype == dtype or torch.equal(weight, weight.to(dtype).to(weight.dtype)) for weight in weights):
            return SOURCES[dtype]
    return "float32"
