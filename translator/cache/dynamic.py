"""The container that grows."""

from translator.cache.dense import DenseCache, grown, whole_blocks
from translator.cache.spec import register


@register
class DynamicCache(DenseCache):
    """Grows by doubling: n steps copy O(n) slots in all, where concatenating at each step copies O(n²)."""

    kind = "dynamic"

    def _reserve(self, length: int, block: int = 1) -> int:
        visible = whole_blocks(length, block)
        if visible > self.slots:
            slots = self.slots
            while slots < visible:
                slots *= 2
            self.k, self.v = grown(self.k, slots, self.clean), grown(self.v, slots, self.clean)
        return visible
