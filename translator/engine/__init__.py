"""How a model is run. `operations.py`: what layers compute with; `eager.py`: plain PyTorch, the reference.

    memory = engine.encode(source, key_padding_mask)      # once a batch of sentences
    decoding = engine.start(memory, key_padding_mask, CacheSpec(beams=4))
    scores = decoding.step(tokens)                        # Scores: top, at, log_z of every row's next token
    decoding.reorder(beam); decoding.compact(keep); decoding.admit(slots, other)

An engine is immutable and shared; a decoding owns what changes.
"""

from translator.engine.base import Decoding, Engine, MatrixScores, Scores
from translator.engine.operations import (
    Activation,
    EagerOperations,
    EagerStack,
    ModelOperations,
    Operations,
    StackOperations,
)

__all__ = [
    "Activation",
    "Decoding",
    "EagerOperations",
    "EagerStack",
    "Engine",
    "MatrixScores",
    "ModelOperations",
    "Operations",
    "Scores",
    "StackOperations",
]
