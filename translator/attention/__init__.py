"""Attention: structures, the dense kernel, masks. Nothing here knows of caches.

A layer calls its structure's `attend(x, step, ops)`; the structure calls the products it names on `ops`, and
`step.attend(q, k, v, ops.attention)` for the attention itself. `step` is a `LayerStep` of a cache, a `FullPass`, or
a `PackedPass`.
A new structure is one file and one line in `STRUCTURES`, a new kernel one file with `@register_kernel`.
"""

from translator.attention.band import Band
from translator.attention.compressed import CompressedAttention
from translator.attention.eager import EagerKernel
from translator.attention.flex import FlexKernel
from translator.attention.full_pass import FullPass
from translator.attention.grouped import GroupedAttention
from translator.attention.kernels import Kernel, attend, merge_heads, split_heads
from translator.attention.latent import LatentAttention
from translator.attention.linear import LinearAttention
from translator.attention.multihead import CachedMultiheadAttention
from translator.attention.named_kernels import (
    DEFAULT_KERNEL,
    KERNELS,
    AttentionKernel,
    SdpaKernel,
    UnsupportedKernelOperation,
    named_kernel,
    register_kernel,
)
from translator.attention.none import NoAttention
from translator.attention.packed_pass import PackedPass, Packing
from translator.attention.shared import SharedAttention
from translator.attention.structure import AttentionStep, Product, Structure
from translator.attention.varlen import VarlenKernel
from translator.attention.window import ChunkedAttention, WindowAttention

STRUCTURES: dict[str, type[Structure]] = {
    "chunked": ChunkedAttention,
    "compressed": CompressedAttention,
    "grouped": GroupedAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "multihead": CachedMultiheadAttention,
    "none": NoAttention,
    "shared": SharedAttention,
    "window": WindowAttention,
}
"""Self-attention structures of the decoder by the name that `ModelConfig.attention` gives."""

__all__ = [
    "DEFAULT_KERNEL",
    "KERNELS",
    "STRUCTURES",
    "AttentionKernel",
    "AttentionStep",
    "Band",
    "CachedMultiheadAttention",
    "ChunkedAttention",
    "CompressedAttention",
    "EagerKernel",
    "FlexKernel",
    "FullPass",
    "GroupedAttention",
    "Kernel",
    "LatentAttention",
    "LinearAttention",
    "NoAttention",
    "PackedPass",
    "Packing",
    "Product",
    "SdpaKernel",
    "SharedAttention",
    "Structure",
    "UnsupportedKernelOperation",
    "VarlenKernel",
    "WindowAttention",
    "attend",
    "merge_heads",
    "named_kernel",
    "register_kernel",
    "split_heads",
]
