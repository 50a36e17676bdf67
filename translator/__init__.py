"""Encoder-decoder translation with a hand-split attention cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from translator.cache import DecoderCache
    from translator.decoder import CachedDecoder
    from translator.decoder_layer import CachedDecoderLayer
    from translator.model import TranslationModel
    from translator.pipeline import Translator

__version__ = "0.1.0"

__all__ = ["CachedDecoder", "CachedDecoderLayer", "DecoderCache", "TranslationModel", "Translator"]

_HOMES = {
    "CachedDecoder": "translator.decoder",
    "CachedDecoderLayer": "translator.decoder_layer",
    "DecoderCache": "translator.cache",
    "TranslationModel": "translator.model",
    "Translator": "translator.pipeline",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line's help and its mistakes need no PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
