"""Encoder-decoder translation with a hand-split attention cache."""

from translator.decoder_layer import CachedDecoder, CachedDecoderLayer

__all__ = ["CachedDecoder", "CachedDecoderLayer"]
