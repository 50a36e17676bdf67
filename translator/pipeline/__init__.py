"""Lines to translations.

`Translator` (`translator.py`) asks `sentences.py` for the sentences of each line and `text.py` for what of them fits
the model; `decoding.py` takes them in the batches of `batching.py` through model and search; then the lines are joined.
"""

from translator.pipeline.translator import Candidate, Translator

__all__ = ["Candidate", "Translator"]
