"""Lines to translations: `Translator` asks `text` for the sentences of each line, `batching` for batches of them, the
model and `search` for each batch's hypotheses, and `text` again to make lines of these.
"""

from translator.pipeline.translator import Candidate, Translator

__all__ = ["Candidate", "Translator"]
