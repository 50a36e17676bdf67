"""The container that is allocated once."""

from dataclasses import replace
from typing import Any

from translator.cache.dense import DenseCache, whole_blocks
from translator.cache.spec import CacheSpec, register
from translator.cache.state import CacheFullError


@register
class StaticCache(DenseCache):
    """`capacity` slots, allocated once and written in place: addresses never change, a full cache says so."""

    kind = "static"
    needs_capacity = True

    def __init__(self, spec: CacheSpec, rows: int, heads: int, width: int, **factory: Any) -> None:
        assert spec.capacity is not None  # checked by the spec
        self.capacity = spec.capacity
        # Whole blocks, so that every view is: how many tokens fit is another matter.
        slots = whole_blocks(spec.capacity, spec.block)
        super().__init__(replace(spec, capacity=slots), rows, heads, width, **factory)

    @classmethod
    def slots_for(cls, spec: CacheSpec, length: int) -> int:
        """See `DenseCache.slots_for`: as many at any length."""
        assert spec.capacity is not None
        return whole_blocks(spec.capacity, spec.block)

    def check_room(self, length: int) -> None:
        """Raises `CacheFullError` beyond the capacity."""
        if length > self.capacity:
            raise CacheFullError(
                f"static cache is full: {length} slots are needed and capacity is {self.capacity}; "
                "start it with a larger capacity or use kind='dynamic'"
            )

    def _reserve(self, length: int, block: int = 1) -> int:
        self.check_room(length)
        return whole_blocks(length, block)
