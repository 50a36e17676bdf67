"""`TranslationModel`: embeddings, positions, encoder, cached decoder, output projection."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import PackedPass, Packing, Product, Structure
from translator.cache import CacheSpec, DecoderCache
from translator.config import ModelConfig
from translator.decoder import CachedDecoder
from translator.decoder_layer import CachedDecoderLayer, full_pass
from translator.dropout import ByteDropout
from translator.encoder import Encoder, EncoderLayer
from translator.operations import ModelOperations
from translator.positions import make_positions
from translator.structures import builders


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
                CachedDecoderLayer(*sizes, layer_norm_eps=eps, batch_first=True, norm_first=True, structure=structure)
                for structure in builders(config)
            ],
            nn.LayerNorm(config.d_model, eps=eps),
        )
        self.dropout = ByteDropout(config.dropout)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        for layer in (*self.encoder.layers, *self.decoder.layers):
            _use_byte_dropout(layer, config.dropout)

    @property
    def attention_kernel(self) -> str:
        """See `CachedDecoder.attention_kernel`; setting it chooses for encoder and decoder."""
        return self.decoder.attention_kernel

    @attention_kernel.setter
    def attention_kernel(self, name: str) -> None:
        self.encoder.attention_kernel = self.decoder.attention_kernel = name

    def make_buffers(self) -> None:
        """Makes what no checkpoint holds, in a model that was put together on the meta device."""
        config = self.config
        for side in ("source_positions", "target_positions"):
            if any(True for _ in getattr(self, side).buffers()):
                setattr(self, side, make_positions(config.positions, config.max_positions, config.d_model))

    def operations(self) -> ModelOperations:
        """The plain operations, on the parameters as they are: training, and the reference."""
        return EagerModel(self)

    def products(self) -> dict[str, Product]:
        """Weight and bias of every product, by its place in the model: what an engine prepares."""
        by_layer = {f"encoder.layers.{i}": layer.products() for i, layer in enumerate(self.encoder.stack)}
        by_layer |= {f"decoder.layers.{i}": layer.products() for i, layer in enumerate(self.decoder.stack)}
        found: dict[str, Product] = {"logits": (self.embedding.weight, None)}
        for place, products in by_layer.items():
            found |= {f"{place}.{name}": product for name, product in products.items()}
        return found

    def encode(
        self,
        source: Tensor,
        source_key_padding_mask: Tensor | None = None,
        operations: ModelOperations | None = None,
    ) -> Tensor:
        """Token ids `(B, S)` → memory `(B, S, D)`; `source_key_padding_mask` `(B, S)`, True = padding.

        `operations` are an engine's, as in `start` and `decode`; without them the plain ones.
        """
        operations = operations or self.operations()
        length = source.shape[1]
        self.check_length("source", length)
        x = operations.embed_source(source, torch.arange(length, device=source.device))
        return self.encoder.run(x, source_key_padding_mask, operations.encoder)

    def start(
        self,
        memory: Tensor,
        source_key_padding_mask: Tensor | None = None,
        spec: CacheSpec | None = None,
        *,
        operations: ModelOperations | None = None,
        **options: Any,
    ) -> DecoderCache:
        """An empty cache for `memory` `(B, S, D)`; see `CachedDecoder.start`."""
        stack = None if operations is None else operations.decoder
        return self.decoder.start(memory, source_key_padding_mask, spec, operations=stack, **options)

    def decode(
        self,
        target: Tensor,
        memory: Tensor | DecoderCache,
        memory_key_padding_mask: Tensor | None = None,
        operations: ModelOperations | None = None,
    ) -> Tensor:
        """Hidden states `(rows, T, D)` of target ids `(rows, T)`.

        With a cache, the ids are the next T of each row; with a memory `(B, S, D)`, they are whole targets under a
        causal mask. Raises `ValueError` past `max_positions`.
        """
        operations = operations or self.operations()
        T = target.shape[1]
        if isinstance(memory, DecoderCache):
            self.check_length("target", memory.length + T)
            x = operations.embed_target(target, memory.positions(T))
            return self.decoder.step(x, memory, operations.decoder)
        self.check_length("target", T)
        x = operations.embed_target(target, torch.arange(T, device=target.device))
        whole = full_pass(self.decoder.num_heads, x, memory, (None, None, True), (None, memory_key_padding_mask, False))
        return self.decoder.run(x, [whole] * len(self.decoder.layers), operations.decoder)

    def packed(
        self,
        source: Tensor,
        target: Tensor,
        source_packing: Packing,
        target_packing: Packing,
        operations: ModelOperations | None = None,
    ) -> Tensor:
        """Hidden states `(N, D)` of whole targets under a causal mask, as `decode` gives them, without any padding.

        `source` `(N_source,)` and `target` `(N,)` are the ids of all sentences, one after another, start token first.
        """
        operations = operations or self.operations()
        self.check_length("source", source_packing.widest)
        self.check_length("target", target_packing.widest)
        x = operations.embed_source(source.unsqueeze(0), source_packing.positions)
        encoder_pass = PackedPass(source_packing)
        for layer, ops in zip(self.encoder.stack, operations.encoder.layers, strict=True):
            x = layer.run(x, encoder_pass, ops)
        memory = operations.encoder.norm(x)
        x = operations.embed_target(target.unsqueeze(0), target_packing.positions)
        decoder_pass = PackedPass(target_packing, True, memory, source_packing)
        return self.decoder.run(x, [decoder_pass] * len(self.decoder.layers), operations.decoder)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """`(…, D)` → `(…, V)`, with the embedding's weight."""
        return F.linear(hidden, self.embedding.weight)

    def forward(self, source: Tensor, target: Tensor, source_key_padding_mask: Tensor | None = None) -> Tensor:
        """Teacher-forced logits `(B, T, V)` for source ids `(B, S)` and target ids `(B, T)`, start token first."""
        memory = self.encode(source, source_key_padding_mask)
        return self.logits(self.decode(target, memory, source_key_padding_mask))

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Vectors `(…, D)` of ids `(…)` with those of their positions added."""
        return self.dropout(self.embedding(ids) * math.sqrt(self.config.d_model) + positions)

    def check_length(self, side: str, length: int) -> None:
        """Raises `ValueError` for a source or target of more tokens than there are positions."""
        if length > self.config.max_positions:
            raise ValueError(f"{side} of {length} tokens is longer than max_positions {self.config.max_positions}")


class EagerModel:
    """`ModelOperations` in plain PyTorch: the model's own modules, as they are at the call."""

    def __init__(self, model: TranslationModel) -> None:
        self.model = model
        self.encoder = model.encoder.operations()
        self.decoder = model.decoder.operations()

    def embed_source(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_source`."""
        return self.model.embed(ids, self.model.source_positions(positions))

    def embed_target(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_target`."""
        return self.model.embed(ids, self.model.target_positions(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ModelOperations.logits`."""
        return self.model.logits(hidden)


def _use_byte_dropout(layer: nn.Module, p: float) -> None:
    """The cheap dropout everywhere but on attention weights, where any dropout costs attention its fast kernel."""
    for name, module in layer.named_children():
        if isinstance(module, nn.Dropout):
            setattr(layer, name, ByteDropout(p))
        elif isinstance(module, Structure):
            module.dropout = 0.0
