"""The container that grows."""

from translator.cache.dense import DenseCache, grown, whole_blocks
from translator.cache.spec import register


class GrowingCache(DenseCache):
    """Grows by doubling: n steps copy O(n) slots in all, where concatenating at each step copies O(n²)."""

    def _reserve(self, length: int, block: int = 1) -> int:
        visible = whole_blocks(length, block)
        if visible > self.slots:
            slots = self.slots
            while slots < visible:
                slots *= 2
            self.k, self.v = grown(self.k, slots, self.clean), grown(self.v, slots, self.clean)
        return visible


@register
class DynamicCache(GrowingCache):
    """Each hypothesis has a row of its own, and room is made when it is needed."""

    kind = "dynamic"
