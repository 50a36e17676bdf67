"""Sentences of like length side by side, and how far they have come."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from translator.pipeline.text import Piece

Progress = Callable[[int, int], None]
"""Called with lines done and lines in all."""


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


def line_counter(by_line: Sequence[Sequence[Piece]], progress: Progress) -> Callable[[Sequence[Piece]], None]:
    """What to call with the pieces of each finished batch, so that `progress` hears how many lines are done."""
    left = Counter(piece.line for pieces in by_line for piece in pieces)
    done = len(by_line) - len(left)

    def count(finished: Sequence[Piece]) -> None:
        nonlocal done
        for piece in finished:
            left[piece.line] -= 1
            done += not left[piece.line]
        progress(done, len(by_line))

    return count
