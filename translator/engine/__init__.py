"""How a model is run: `eager.py` is plain PyTorch, the reference; `packed.py` is the fast one on CPUs, `graphs.py` on
GPUs; `ensemble.py` is several engines as one. `engines.py` knows them by name.

    memory = engine.encode(source, key_padding_mask)      # once a batch of sentences
    decoding = engine.start(memory, key_padding_mask, CacheSpec(beams=4))
    scores = decoding.step(tokens)                        # Scores: top, at, log_z of every row's next token
    decoding.reorder(beam); decoding.compact(keep); decoding.admit(slots, other)

`native/` has the packed engine's kernels and records its steps; `prepacked.py` stands in where they aren't built;
`store.py` reads what was packed before; `exact.py` tries a machine before results to the bit are promised.
An engine is immutable and shared; a decoding owns what changes. What layers compute with, and an engine provides, are
`translator.operations`.
"""

from translator.engine.base import Decoding, Engine, MatrixScores, Scores

__all__ = ["Decoding", "Engine", "MatrixScores", "Scores"]
