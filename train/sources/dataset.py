"""Hugging Face data sets, from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from train.sources.base import Corpus, FileName, Pair, field
from train.sources.columns import Columns
from train.sources.table import is_table, table_rows
from translator.config import STRICT
from translator.errors import UserError


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DatasetCorpus(Corpus):
    """A Hugging Face data set: a name on the hub or a local folder of data files.

    `source` and `target` are columns (`a.b` for b inside a); without them see `Columns`. A folder may hold data
    files or be what `save_to_disk` wrote.
    """

    FORM: ClassVar[str] = "{dataset = …}"

    dataset: FileName
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
        columns = Columns(self.source, self.target, source_language, target_language)
        rows = self._rows(base)
        if isinstance(rows, list):
            for path in rows:
                for number, source, target in table_rows(path, columns):
                    yield Pair(source, target, f"{self.dataset}/{path.name}:{number}")
            return
        sides: tuple[str, str] | None = None
        for number, row in enumerate(rows, 1):
            where = f"{self.dataset}:{number}"
            sides = sides or columns.of_record(row, where)
            yield Pair(field(row, sides[0], where), field(row, sides[1], where), where)

    def _rows(self, base: Path) -> Any:
        """The rows of the split; the files that hold them where they are tables, for those are read here as text."""
        # Imported late: it takes seconds, and most recipes do without.
        import datasets

        folder = base / self.dataset
        local = folder.is_dir()
        if not local and not _hub_answers(self.dataset):
            # Asked without a network, the library retries for half a minute or more; offline it looks in its
            # cache at once.
            datasets.config.HF_HUB_OFFLINE = True
        try:
            if (folder / "dataset_dict.json").is_file():
                parts = datasets.load_from_disk(str(folder))
                if self.split not in parts:
                    raise UserError(f"it has the splits {', '.join(parts)}; name one of them with split = …")
                return parts[self.split]
            if (folder / "state.json").is_file():
                return datasets.load_from_disk(str(folder))
            place = str(folder) if local else self.dataset
            builder = datasets.load_dataset_builder(place, self.config)
            if local and (tables := self._tables(builder)):
                return tables
            # Where the library reads a table itself, the words NA and null are still words.
            options = {"keep_default_na": False} if hasattr(builder.config, "keep_default_na") else {}
            return datasets.load_dataset(place, self.config, split=self.split, **options)
        except Exception as error:  # the library and its network stack raise dozens of unrelated types
            reason = " ".join(str(error).split()) or type(error).__name__
            also = "" if local else f"; there is no local folder {folder} either"
            wanted = f"{self.dataset!r} ({self.config or 'no config'}, split {self.split})"
            raise UserError(f"corpora: cannot load dataset {wanted}: {reason}{also}") from error

    def _tables(self, builder: Any) -> list[Path]:
        # The library guesses types: the words NA and null would become nothing, 007 a number.
        paths = [Path(file) for file in (builder.config.data_files or {}).get(self.split, ())]
        return paths if all(is_table(path.name) for path in paths) else []


def _hub_answers(name: str) -> bool:
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # an answer, if not the one hoped for: load_dataset says what it was
    except Exception:  # whatever the network stack raises
        return False
    return True
