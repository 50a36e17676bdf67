"""The container that grows."""

from torch import Tensor

from translator.cache.dense import DenseCache, grown, whole_blocks


class DynamicCache(DenseCache):
    """Grows by doubling: n steps copy O(n) slots in all, where concatenating at each step copies O(n²)."""

    kind = "dynamic"
    first_slots = 32

    def __init__(self, rows: int, like: Tensor, capacity: int | None = None) -> None:
        super().__init__(rows, like, capacity or self.first_slots)

    def reserve(self, length: int, block: int) -> int:
        """Doubles the slots until `length`, in whole blocks, fits; returns how many slots a view shows."""
        visible = whole_blocks(length, block)
        if visible > self.slots:
            slots = self.slots
            while slots < visible:
                slots *= 2
            self.k, self.v = grown(self.k, slots, self.clean), grown(self.v, slots, self.clean)
        return visible
