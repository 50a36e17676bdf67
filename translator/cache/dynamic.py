"""The container that grows."""

from translator.cache.dense import DenseCache, grown, whole_blocks
from translator.cache.spec import CacheSpec, register


class GrowingCache(DenseCache):
    """Grows by doubling: n steps copy O(n) slots in all, where concatenating at each step copies O(n²)."""

    @classmethod
    def slots_for(cls, spec: CacheSpec, length: int) -> int:
        """See `DenseCache.slots_for`: the first ones, doubled until they do."""
        slots = spec.capacity or cls.first_slots
        return slots << (-(-whole_blocks(length, spec.block) // slots) - 1).bit_length() if length else slots

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
