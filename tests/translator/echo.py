"""A model that costs nothing: it says its source again. For whatever is around a model, at any length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from translator.cache import CacheSpec
from translator.engine import MatrixScores


class EchoEngine:
    """See `Engine`. Every target is the first `most` tokens of its source, then the end."""

    device = torch.device("cpu")
    cache_kind = "dynamic"

    def __init__(self, vocab_size: int, end_id: int, most: int = 1 << 20, max_positions: int = 96) -> None:
        self.vocab_size, self.end_id, self.most, self.max_positions = vocab_size, end_id, most, max_positions

    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The ids themselves, padding as the end."""
        return source if key_padding_mask is None else source.masked_fill(key_padding_mask, self.end_id)

    def start(self, memory: Any, key_padding_mask: Tensor | None, spec: CacheSpec) -> "EchoDecoding":
        """See `Engine.start`."""
        return EchoDecoding(self, memory, spec.beams)


class EchoDecoding:
    """See `Decoding`. `left` `(B, S)` is what comes next."""

    def __init__(self, engine: EchoEngine, left: Tensor, beams: int) -> None:
        self.engine, self.beams = engine, beams
        self.left = left.clone()
        self.left[:, engine.most :] = engine.end_id
        self.steps = torch.zeros(len(left), dtype=torch.int64)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.left)

    def step(self, tokens: Tensor) -> MatrixScores:
        """See `Decoding.step`."""
        places = self.steps.clamp(max=self.left.shape[1] - 1).unsqueeze(1)
        self.steps += 1
        said = self.left.gather(1, places).repeat_interleave(self.beams, dim=0)  # (rows, 1)
        logits = torch.full((len(said), self.engine.vocab_size), -20.0)
        logits[:, self.engine.end_id] = -40.0  # an early end is no better than any other token
        return MatrixScores(logits.scatter_(1, said, 0.0), torch.zeros(len(said), dtype=torch.float64))

    def reorder(self, beam: Tensor) -> None:
        """All beams of a sentence say the same."""

    def compact(self, keep: Tensor) -> None:
        """See `Decoding.compact`."""
        self.left, self.steps = self.left[keep], self.steps[keep]

    def admit(self, slots: Sequence[int], newcomers: "EchoDecoding") -> None:
        """See `Decoding.admit`."""
        raise NotImplementedError
