"""What the formats share: the check of what every one of them lacks, and the card that goes with the files."""

from translator.checkpoint import CheckpointConfig
from translator.config import ModelConfig
from translator.engine.native.weights import AUTO
from translator.errors import UserError

CARD = """\
# {source} to {target}, for {toolkit}

Exported from a checkpoint of Translator: {layers} layers (encoder + decoder), {width} wide, {vocabulary:,} pieces.
The weights keep the terms of the checkpoint they come from. From this folder:

```python
{usage}```

Text goes in and comes out through the SentencePiece model, white space of any kind and length as one space. Sources end
with the end token; a source or target has at most {positions} tokens, end token included.
"""
SLOTS = """
The vocabulary has placeholders (U+E000 to U+E00F) for numbers, addresses, tags and the like. `Sides.source` of
Translator's `translator.typed.sides` puts them into a sentence, in the form that the model was trained on, and
`Sides.target` puts back what they stand for.
"""


def check_structure(model: ModelConfig, compute_type: str, to: str) -> None:
    """Raises `UserError` for another self-attention than multi-head, which is all that other toolkits know, and for a
    compute type: they convert weights as they load them.
    """
    if compute_type != AUTO:
        raise UserError(f"--compute-type {compute_type}: goes with --to packed; {to} gets weights in fp32")
    others = sorted({*model.structures} - {"multihead"})
    if others:
        raise UserError(f"--to {to}: cannot express attention = {others[0]!r}; it has multihead alone")


def load_instructions(config: CheckpointConfig, toolkit: str, usage: str, slots: bool) -> str:
    """The text of the export's README.md, with `usage` as its Python; `slots` says that the vocabulary has some."""
    model = config.model
    return (CARD + SLOTS * slots).format(
        source=config.source_language,
        target=config.target_language,
        toolkit=toolkit,
        layers=f"{model.num_encoder_layers} + {model.num_decoder_layers}",
        width=model.d_model,
        vocabulary=model.vocab_size,
        positions=model.max_positions,
        usage=usage,
    )
