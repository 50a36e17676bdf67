"""Caches of a decoder's K and V: one file a container, one contract."""

from translator.cache.base import (
    CacheFullError,
    CrossAttentionCache,
    LayerCache,
    LayerStep,
    SelfAttentionCache,
    Step,
    UnsupportedCacheOperation,
)
from translator.cache.decoder_cache import CACHE_KINDS, DecoderCache
from translator.cache.dynamic import DynamicCache
from translator.cache.static import StaticCache

__all__ = [
    "CACHE_KINDS",
    "CacheFullError",
    "CrossAttentionCache",
    "DecoderCache",
    "DynamicCache",
    "LayerCache",
    "LayerStep",
    "SelfAttentionCache",
    "StaticCache",
    "Step",
    "UnsupportedCacheOperation",
]
