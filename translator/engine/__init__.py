"""How a model is run: `eager.py` is plain PyTorch, the reference; `ensemble.py` is several engines as one.

    memory = engine.encode(source, key_padding_mask)      # once a batch of sentences
    decoding = engine.start(memory, key_padding_mask, CacheSpec(beams=4))
    scores = decoding.step(tokens)                        # Scores: top, at, log_z of every row's next token
    decoding.reorder(beam); decoding.compact(keep); decoding.admit(slots, other)

An engine is immutable and shared; a decoding owns what changes. What layers compute with, and an engine provides, are
`translator.operations`.
"""

from translator.engine.base import Decoding, Engine, MatrixScores, Scores

__all__ = ["Decoding", "Engine", "MatrixScores", "Scores"]
