"""Where parallel text comes from: each kind of `corpora` entry in a recipe, checked and then read into pairs.

A recipe lists its corpora, one entry a line::

    corpora = [
        "package:hsg",                  # parallel text inside an installed Python package
        ["mine.en", "mine.zh"],         # two aligned files, source language first
        "mine.tsv",                     # a table: .tsv, .csv, .jsonl (packed or not: .gz, .xz, .bz2), .parquet
        "mine.po", "mine.tmx",          # a gettext catalogue (.po, .mo), a translation memory
        {table = "x.csv", source = "en_col", target = "zh_col"},
        {dataset = "opus100", config = "en-zh", source = "translation.en", target = "translation.zh"},
        {package = "hsg", name = "everyday"},                # held-out sentences of one name are scored together
        {source = "mine.en", target = "mine.zh", repeat = 9} # nine times an epoch
    ]

A kind is one file here, with its form in a recipe, and one line in `KINDS`.
"""

from __future__ import annotations

from dataclasses import fields

from train.sources.aligned import AlignedCorpus
from train.sources.base import Corpus, Pair
from train.sources.catalogue import CatalogueCorpus
from train.sources.dataset import DatasetCorpus
from train.sources.memory import MemoryCorpus
from train.sources.package import PackageCorpus
from train.sources.table import TableCorpus
from translator.config import parse
from translator.errors import UserError

__all__ = ["KINDS", "Corpus", "Pair", "parse_corpus"]

# The first kind that recognises an entry reads it; a table takes every file name, so it comes last.
KINDS: tuple[type[Corpus], ...] = (
    PackageCorpus,
    AlignedCorpus,
    DatasetCorpus,
    CatalogueCorpus,
    MemoryCorpus,
    TableCorpus,
)


def parse_corpus(entry: object) -> Corpus:
    """The corpus that one entry of a recipe's `corpora` describes.

    Raises:
        UserError: the entry has no such form, a key is misspelt, missing or of the wrong type, or the package
            is unknown; the message lists what is valid.
    """
    for kind in KINDS:
        values = kind.recognise(entry)
        if values is None:
            continue
        valid = [field.name for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))]
        for key in values:
            if key not in valid:
                raise UserError(f"corpora: unknown key {key!r} in {entry!r}; valid keys: {', '.join(valid)}")
        return parse(kind, values, where=f"corpora: {entry!r}")
    raise UserError(f"corpora: {entry!r} is none of: {', '.join(kind.FORM for kind in KINDS)}")
