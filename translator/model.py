"""`TranslationModel`: embeddings, positions, encoder, cached decoder, output projection."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import STRUCTURES, Structure
from translator.cache import CacheSpec, DecoderCache
from translator.config import ModelConfig
from translator.decoder import CachedDecoder
from translator.decoder_layer import CachedDecoderLayer
from translator.dropout import ByteDropout
from translator.encoder import Encoder, EncoderLayer
from translator.errors import UserError
from translator.positions import make_positions


class TranslationModel(nn.Module):
    """Pre-norm Transformer over one joint vocabulary, its embedding shared by source, target and output.

    Positions and masks of the decoder come from the cache's lengths and nothing else.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.source_positions = make_positions(config.positions, config.max_positions, config.d_model)
        self.target_positions = make_positions(config.positions, config.max_positions, config.d_model)
        sizes = (config.d_model, config.nhead, config.dim_feedforward, config.dropout, config.activation)
        eps = config.layer_norm_eps
        self.encoder = Encoder(
            [EncoderLayer(*sizes, layer_norm_eps=eps) for _ in range(config.num_encoder_layers)], config.d_model, eps
        )
        self.decoder = CachedDecoder(
            [
                CachedDecoderLayer(
                    *sizes, layer_norm_eps=eps, batch_first=True, norm_first=True, structure=structure(config.attention)
                )
                for _ in range(config.num_decoder_layers)
            ],
            nn.LayerNorm(config.d_model, eps=eps),
        )
        self.dropout = ByteDropout(config.dropout)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        for layer in (*self.encoder.layers, *self.decoder.layers):
            _use_byte_dropout(layer, config.dropout)

    def encode(self, source: Tensor, source_key_padding_mask: Tensor | None = None) -> Tensor:
        """Token ids `(B, S)` → memory `(B, S, D)`; `source_key_padding_mask` `(B, S)`, True = padding."""
        length = source.shape[1]
        self._check_length("source", length)
        positions = torch.arange(length, device=source.device)
        return self.encoder(self._embed(source, self.source_positions(positions)), source_key_padding_mask)

    def start(
        self,
        memory: Tensor,
        source_key_padding_mask: Tensor | None = None,
        spec: CacheSpec | None = None,
        **options: Any,
    ) -> DecoderCache:
        """An empty cache for `memory` `(B, S, D)`; see `CachedDecoder.start`."""
        return self.decoder.start(memory, source_key_padding_mask, spec, **options)

    def decode(
        self,
        target: Tensor,
        memory: Tensor | DecoderCache,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states `(rows, T, D)` of target ids `(rows, T)`.

        With a cache, the ids are the next T of each row; with a memory `(B, S, D)`, they are whole targets under a
        causal mask. Raises `ValueError` past `max_positions`.
        """
        if isinstance(memory, DecoderCache):
            self._check_length("target", memory.length + target.shape[1])
            positions = memory.positions(target.shape[1])
            return self.decoder(self._embed(target, self.target_positions(positions)), memory)
        self._check_length("target", target.shape[1])
        positions = torch.arange(target.shape[1], device=target.device)
        return self.decoder(
            self._embed(target, self.target_positions(positions)),
            memory,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=True,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """`(…, D)` → `(…, V)`, with the embedding's weight."""
        return F.linear(hidden, self.embedding.weight)

    def forward(self, source: Tensor, target: Tensor, source_key_padding_mask: Tensor | None = None) -> Tensor:
        """Teacher-forced logits `(B, T, V)` for source ids `(B, S)` and target ids `(B, T)`, start token first."""
        memory = self.encode(source, source_key_padding_mask)
        return self.logits(self.decode(target, memory, source_key_padding_mask))

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.d_model) + positions)

    def _check_length(self, side: str, length: int) -> None:
        if length > self.config.max_positions:
            raise ValueError(f"{side} of {length} tokens is longer than max_positions {self.config.max_positions}")


def structure(name: str) -> type[Structure]:
    """The self-attention structure of that name; raises `UserError` for an unknown one."""
    if name not in STRUCTURES:
        raise UserError(f"model.attention = {name!r}: unknown structure; known: {', '.join(sorted(STRUCTURES))}")
    return STRUCTURES[name]


def _use_byte_dropout(layer: nn.Module, p: float) -> None:
    """The cheap dropout everywhere but on attention weights, where any dropout costs attention its fast kernel."""
    for name, module in layer.named_children():
        if isinstance(module, nn.Dropout):
            setattr(layer, name, ByteDropout(p))
        elif isinstance(module, Structure):
            module.dropout = 0.0
