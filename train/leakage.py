"""Proof that no sentence of a test set is in a recipe's training text, on either side."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from train.data import load_data
from train.filters import folded
from train.recipe import read_recipe
from train.sources import Pair

SHOWN = 5


@dataclass(frozen=True)
class Leakage:
    """`found` are training pairs that hold a test sentence; `sentences` were looked for among `pairs`."""

    found: list[Pair]
    sentences: int
    pairs: int

    def lines(self) -> list[str]:
        """What was found, for people."""
        count = len(self.found)
        head = f"leakage: {count:,} of {self.pairs:,} training pairs hold one of {self.sentences:,} test sentences"
        shown = [f"  {pair.origin}: {pair.source} | {pair.target}" for pair in self.found[:SHOWN]]
        return [head, *shown, *([f"  and {count - SHOWN:,} more"] if count > SHOWN else [])]


def leakage(recipe: str, settings: list[str], folder: Path | None, test: Iterable[str] | None = None) -> Leakage:
    """Looks for the `test` sentences, of either language, in what a run of `recipe` would train on.

    By default those of the recipe's own test part, all references included. Case and blanks around a sentence don't
    count, and neither does what nobody sees. Raises `UserError` for a recipe or text that can't be read.
    """
    read, base = read_recipe(recipe, settings, folder)
    data = load_data(read, base, lambda line: None)
    if test is None:
        held = data.test
        test = [*held.sources, *(text for references in held.references for text in references)]
    wanted = {folded(text) for text in test} - {""}
    found = [pair for pair in data.train if folded(pair.source) in wanted or folded(pair.target) in wanted]
    return Leakage(found, len(wanted), len(data.train))
