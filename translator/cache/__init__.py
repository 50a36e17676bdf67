"""What a decoder keeps between steps.

    step = cache.begin(T)               # Step: positions, slots; each state says what it shows and gets that mask
    k, v = step.layers[i].update(k, v)  # LayerStep → KeyValueState.append, then .shown: all keys and values so far
    cache.commit(step)                  # lengths advance; without it the step never happened

`DecoderCache` holds, for each layer, the state that the layer's structure made (a `LayerState`: a `KeyValueState`,
which is what containers are, or a `NamedState` where it is recurrent), K and V of the source (`SourceState`), and one
`Lengths` for the whole stack.
Grid operations (`expand`, `reorder`, `compact`, `admit`, `crop`, `reset`) are checked there once and reach the states
as row indices. A new container is one file with `@register` and its import here.
"""

from translator.cache.compressed import CompressedState
from translator.cache.decoder_cache import DecoderCache
from translator.cache.dense import DenseCache
from translator.cache.dynamic import DynamicCache
from translator.cache.empty import EmptyState, SharedState
from translator.cache.fixed import FixedStep
from translator.cache.indirect import IndirectCache
from translator.cache.layer_step import LayerStep, StackStep
from translator.cache.lengths import Lengths
from translator.cache.named import NamedState
from translator.cache.offloaded import OffloadedCache
from translator.cache.paged import PagedCache, recall, remember
from translator.cache.pool import BlockPool
from translator.cache.quantised import QuantisedCache
from translator.cache.sliding import SlidingCache, StaticSlidingCache
from translator.cache.source import SourceState
from translator.cache.spec import (
    APPROXIMATE_KINDS,
    CACHE_KINDS,
    CacheSpec,
    cache_options,
    container_of,
    register,
)
from translator.cache.state import CacheFullError, KeyValueState, LayerState, UnsupportedCacheOperation
from translator.cache.static import StaticCache
from translator.cache.step import Step, View
from translator.cache.window import WindowState

__all__ = [
    "APPROXIMATE_KINDS",
    "CACHE_KINDS",
    "BlockPool",
    "CacheFullError",
    "CacheSpec",
    "CompressedState",
    "DecoderCache",
    "DenseCache",
    "DynamicCache",
    "EmptyState",
    "FixedStep",
    "IndirectCache",
    "KeyValueState",
    "LayerState",
    "LayerStep",
    "Lengths",
    "NamedState",
    "OffloadedCache",
    "PagedCache",
    "QuantisedCache",
    "SharedState",
    "SlidingCache",
    "SourceState",
    "StackStep",
    "StaticCache",
    "StaticSlidingCache",
    "Step",
    "UnsupportedCacheOperation",
    "View",
    "WindowState",
    "cache_options",
    "container_of",
    "recall",
    "register",
    "remember",
]
