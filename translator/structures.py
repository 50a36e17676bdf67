"""Which self-attention each decoder layer has, from names and options to what builds it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from translator.attention import STRUCTURES, Structure
from translator.config import LayerEntry, ModelConfig, layer_name, parse
from translator.errors import UserError

Builder = Callable[..., Structure]
"""What makes a structure from the arguments of `nn.MultiheadAttention`; see `Structure`."""


def builders(config: ModelConfig) -> list[Builder]:
    """One a decoder layer; raises `UserError` that names the layer for unknown structures and impossible options."""
    if not config.decoder_layers:
        return [builder(config.attention, "model.attention")] * config.num_decoder_layers
    return [builder(entry, f"model.decoder_layers[{index}]") for index, entry in enumerate(config.decoder_layers)]


def builder(entry: LayerEntry, where: str) -> Builder:
    """What builds the structure that `entry` names, with its options; raises `UserError` that begins with `where`."""
    name = layer_name(entry)
    if name not in STRUCTURES:
        raise UserError(f"{where} = {name!r}: unknown structure; known: {', '.join(sorted(STRUCTURES))}")
    chosen = STRUCTURES[name]
    given: dict[str, Any] = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "attention"}
    if chosen.options is None:
        if given:
            raise UserError(f"{where}: {name!r} takes no options, not {', '.join(sorted(given))}")
        return chosen
    return partial(_built, chosen, where, options=parse(chosen.options, given, where=where))


def _built(chosen: Builder, where: str, *sizes: int, **named: Any) -> Structure:
    try:
        return chosen(*sizes, **named)
    except ValueError as error:  # options that don't go with these sizes
        raise UserError(f"{where}: {error}") from None
