"""Attention: structures, the dense kernel, masks. Nothing here knows of caches.

A layer calls its structure's `attend(x, step, ops)`; the structure calls the products it names on `ops`, and
`step.attend(q, k, v, ops.attention)` for the attention itself. `step` is a `LayerStep` of a cache, a `FullPass`, or
a `PackedPass`.
A new structure is one file and one line in `STRUCTURES`.
"""

from translator.attention.full_pass import FullPass
from translator.attention.kernels import Kernel, attend, merge_heads, split_heads
from translator.attention.latent import LatentAttention
from translator.attention.linear import LinearAttention
from translator.attention.multihead import CachedMultiheadAttention
from translator.attention.packed_pass import PackedPass, Packing
from translator.attention.structure import AttentionStep, Product, Structure

STRUCTURES: dict[str, type[Structure]] = {
    "latent": LatentAttention,
    "linear": LinearAttention,
    "multihead": CachedMultiheadAttention,
}
"""Self-attention structures of the decoder by the name that `ModelConfig.attention` gives."""

__all__ = [
    "STRUCTURES",
    "AttentionStep",
    "CachedMultiheadAttention",
    "FullPass",
    "Kernel",
    "LatentAttention",
    "LinearAttention",
    "PackedPass",
    "Packing",
    "Product",
    "Structure",
    "attend",
    "merge_heads",
    "split_heads",
]
