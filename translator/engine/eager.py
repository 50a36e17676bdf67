"""The reference engine: a `TranslationModel` in plain PyTorch, one operation after another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from translator.cache import CacheSpec, DecoderCache
from translator.engine.base import MatrixScores, normalised
from translator.model import TranslationModel


class EagerEngine:
    """See `Engine`; the model's parameters are used as they are at each call."""

    def __init__(self, model: TranslationModel) -> None:
        self.model = model
        self.operations = model.operations()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The model's."""
        return self.model.config.max_positions

    @property
    def cache_kind(self) -> str:
        """See `Engine.cache_kind`."""
        return "dynamic"

    @torch.no_grad()
    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Memory `(B, S, D)` of ids `(B, S)`."""
        return self.model.encode(source, key_padding_mask, self.operations)

    @torch.no_grad()
    def log_probs(self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Engine.log_probs`."""
        return normalised(self.model(source, target, key_padding_mask))

    @torch.no_grad()
    def start(self, memory: Tensor, key_padding_mask: Tensor | None, spec: CacheSpec) -> "EagerDecoding":
        """See `Engine.start`."""
        cache = self.model.start(memory, key_padding_mask, spec, operations=self.operations)
        return EagerDecoding(self, cache)


class EagerDecoding:
    """An `EagerEngine` with its cache; see `Decoding`."""

    def __init__(self, engine: EagerEngine, cache: DecoderCache) -> None:
        self.engine = engine
        self.cache = cache

    @property
    def batch_size(self) -> int:
        """Sentences in the grid."""
        return self.cache.batch_size

    @property
    def beams(self) -> int:
        """Rows a sentence."""
        return self.cache.beams

    @torch.no_grad()
    def step(self, tokens: Tensor) -> MatrixScores:
        """See `Decoding.step`."""
        model, operations = self.engine.model, self.engine.operations
        hidden = model.decode(tokens.to(self.cache.device).unsqueeze(1), self.cache, operations=operations)
        return MatrixScores(operations.logits(hidden[:, -1]))

    def reorder(self, beam: Tensor) -> None:
        """See `Decoding.reorder`."""
        self.cache.reorder(beam)

    def compact(self, keep: Tensor) -> None:
        """See `Decoding.compact`."""
        self.cache.compact(keep)

    def admit(self, slots: Sequence[int], newcomers: "EagerDecoding") -> None:
        """See `Decoding.admit`."""
        self.cache.admit(slots, newcomers.cache)
