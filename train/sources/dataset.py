"""Hugging Face data sets, from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, Pair, field
from translator.config import STRICT
from translator.errors import UserError


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DatasetCorpus(Corpus):
    """A Hugging Face data set: a name on the hub or a local folder of data files.

    `source` and `target` are columns (`a.b` for b inside a); they default to `translation.<language>`.
    """

    FORM: ClassVar[str] = "{dataset = …}"

    dataset: str
    config: str | None = None
    split: str = "train"
    source: str | None = None
    target: str | None = None

    @classmethod
    def recognise(cls, entry: object) -> dict[str, Any] | None:
        """A table with the key `dataset`."""
        return entry if isinstance(entry, dict) and "dataset" in entry and "table" not in entry else None

    def load(self, source_language: str, target_language: str, base: Path) -> Iterator[Pair]:
        """Yield a pair a row of the split.

        Raises:
            UserError: the data set cannot be had (no network, unknown name, script) or lacks the columns.
        """
        source = self.source or f"translation.{source_language}"
        target = self.target or f"translation.{target_language}"
        for number, row in enumerate(self._rows(base), 1):
            where = f"{self.dataset}:{number}"
            yield Pair(field(row, source, where), field(row, target, where), where)

    def _rows(self, base: Path) -> Any:
        # Imported late: it takes seconds, and most recipes do without.
        import datasets

        folder = base / self.dataset
        local = folder.is_dir()
        if not local and not _hub_answers(self.dataset):
            # Asked without a network, the library retries for half a minute or more; offline it looks in its
            # cache at once.
            datasets.config.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(str(folder) if local else self.dataset, self.config, split=self.split)
        except Exception as error:  # the library and its network stack raise dozens of unrelated types
            reason = " ".join(str(error).split()) or type(error).__name__
            also = "" if local else f"; there is no local folder {folder} either"
            wanted = f"{self.dataset!r} ({self.config or 'no config'}, split {self.split})"
            raise UserError(f"corpora: cannot load dataset {wanted}: {reason}{also}") from error


def _hub_answers(name: str) -> bool:
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # an answer, if not the one hoped for: load_dataset says what it was
    except Exception:  # whatever the network stack raises
        return False
    return True
