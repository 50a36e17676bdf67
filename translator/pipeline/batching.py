"""Sentences of like length side by side."""

from collections.abc import Iterator, Sequence


def batches(widths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of like width, longest first, each at most `budget` wide in all, padding included."""
    order = sorted(range(len(widths)), key=lambda index: -widths[index])
    batch: list[int] = []
    for index in order:
        if batch and widths[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
