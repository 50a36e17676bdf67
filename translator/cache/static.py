"""The container that is allocated once."""

from torch import Tensor

from translator.cache.base import CacheFullError
from translator.cache.dense import DenseCache, whole_blocks


class StaticCache(DenseCache):
    """`capacity` slots, allocated once and written in place: addresses never change, a full cache says so."""

    kind = "static"

    def __init__(self, rows: int, like: Tensor, capacity: int | None = None) -> None:
        if capacity is None:
            raise ValueError("cache kind 'static' needs a capacity: the most tokens a row will hold")
        super().__init__(rows, like, capacity)

    def reserve(self, length: int, block: int) -> int:
        """Raises `CacheFullError` when `length` slots are more than there are; returns how many a view shows."""
        if length > self.slots:
            raise CacheFullError(
                f"static cache is full: {length} slots are needed and capacity is {self.slots}; "
                "start it with a larger capacity or use kind='dynamic'"
            )
        return min(whole_blocks(length, block), self.slots)
