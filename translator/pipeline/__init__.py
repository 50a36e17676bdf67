"""Lines to translations.

`Translator` (`translator.py`) asks `sentences.py` for the sentences of each line and `text.py` for what of them fits
the model. `bulk.py` takes windows of lines, finds what is to be decoded once, and hands batches to the threads of
`workers.py`; there `decoding.py` takes each through model and search; then the lines are joined, in order.
"""

from translator.pipeline.translator import Candidate, Translator

__all__ = ["Candidate", "Translator"]
