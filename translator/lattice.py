"""Random segmentations of a text by a unigram vocabulary, drawn with a generator of one's own.

SentencePiece draws too, but its generator does not repeat from one process to the next, and a training run that is
resumed has to see the very segmentations it would have seen.
"""

import math
from collections.abc import Callable, Mapping

# A forward sum below this is scaled up, together with those after it, which grow from it.
_SMALL = 1e-150


class Lattice:
    """All segmentations of a text into known pieces, each with probability ∝ exp(`alpha` × sum of its scores).

    `scores` are log-probabilities by piece; a character that no piece covers has `unknown`. Kudo 2018, by forward
    filtering and backward sampling: exact, in time linear in the text.
    """

    def __init__(self, scores: Mapping[str, float], unknown: float, alpha: float) -> None:
        # Beginnings of pieces weigh nothing, but say that it's worth reading on.
        self._weights = {piece[:end]: 0.0 for piece in scores for end in range(1, len(piece))}
        self._weights |= {piece: math.exp(alpha * min(score, 0.0)) for piece, score in scores.items()}
        self._unknown = math.exp(alpha * unknown)
        self._longest = max(map(len, scores), default=1)

    def draw(self, text: str, random: Callable[[], float]) -> list[str]:
        """One segmentation of `text`; `random` gives the numbers in [0, 1) that decide it, one a piece."""
        pieces: list[str] = []
        arcs = self._forward(text)
        end = len(text)
        while end:
            into = arcs[end]
            drawn = random() * into[-1][1]
            start = next((start for start, total in into if drawn < total), into[-1][0])
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]

    def _forward(self, text: str) -> list[list[tuple[int, float]]]:
        """For each end of a piece, where it may start, with the running sum of the weights of all ways to get there."""
        weight, unknown, length = self._weights.get, self._unknown, len(text)
        arcs: list[list[tuple[int, float]]] = [[] for _ in range(length + 1)]
        sums = [1.0] + [0.0] * length
        for start in range(length):
            if sums[start] < _SMALL:
                self._scale(sums, arcs, start)
            so_far = sums[start]
            for end in range(start + 1, length + 1):
                known = weight(text[start:end])
                if end == start + 1:
                    known = known or unknown
                elif known is None:
                    break
                if known:
                    sums[end] += so_far * known
                    arcs[end].append((start, sums[end]))
        return arcs

    def _scale(self, sums: list[float], arcs: list[list[tuple[int, float]]], start: int) -> None:
        for place in range(start, min(start + self._longest + 1, len(sums))):
            sums[place] /= _SMALL
            arcs[place] = [(begin, total / _SMALL) for begin, total in arcs[place]]
