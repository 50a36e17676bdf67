"""From a recipe to the text a run trains, validates and tests on, and from text to ids."""

import dataclasses
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.auto import Auto
from train.batches import Encoded
from train.corpus import (
    EvalSet,
    Pair,
    Say,
    Side,
    Split,
    by_name,
    joined,
    load_corpora,
    simplify,
    split_pairs,
    top_up_dev,
)
from train.filters import account_lines, filter_pairs
from train.recipe import Recipe
from translator.errors import UserError
from translator.languages import language
from translator.tokenizer import Tokenizer
from translator.typed.plain import narrow, plain
from translator.typed.sides import Sides
from translator.typed.spans import protect
from translator.typed.visible import visible


@dataclass(slots=True)
class Data:
    """The parts of a run's corpus. `dev_pairs` are the pairs behind `dev`, for the validation loss; `dev_sets` and
    `test_sets` are by the names of the corpora, in the recipe's order, none of them empty."""

    train: list[Pair]
    dev_pairs: list[Pair]
    dev_sets: dict[str, EvalSet]
    test_sets: dict[str, EvalSet]

    @property
    def dev(self) -> EvalSet:
        """All of `dev_sets`."""
        return joined(self.dev_sets.values())

    @property
    def test(self) -> EvalSet:
        """All of `test_sets`."""
        return joined(self.test_sets.values())

    def fingerprint(self) -> str:
        """Changes when the training or dev text changes, so that a resumed run can tell."""
        digest = hashlib.sha256()
        for pair in (*self.train, *self.dev_pairs):
            digest.update(f"{pair.source}\0{pair.target}\0".encode())
        return digest.hexdigest()[:16]


def load_data(recipe: Recipe, base: Path, say: Say, dropped: dict[str, list[Pair]] | None = None) -> Data:
    """Reads, simplifies, splits and filters the corpora of a recipe, and says what each filter dropped.

    `dropped` receives the first few pairs of each filter.
    Raises `UserError` for corpora that can't be read or leave nothing to train on.
    """
    split = _split(recipe, base, say)
    held_out = split.dev + split.test
    languages = recipe.source_language, recipe.target_language
    kept, account = filter_pairs(split.train, held_out, recipe.filters, *languages, dropped)
    for line in account_lines(account, len(kept)):
        say(line)
    if not kept:
        raise UserError("corpora: no pair is left to train on; see the account above for what dropped them")
    train = _repeated(kept)
    if len(train) > len(kept):
        say(f"pairs repeated to          {len(train):,}: " + ", ".join(_shares(train)))
    if recipe.both_directions:
        train += [pair.turn() for pair in train]
        say(f"pairs in both directions   {len(train):,}")
    data = Data(train, split.dev, by_name(split.dev), by_name(split.test))
    say(f"dev {_sentences(data.dev_sets)}; test {_sentences(data.test_sets)}")
    return data


def _repeated(pairs: Sequence[Pair]) -> list[Pair]:
    """Each pair as often as its corpus says; those of "auto" so often that together they are about a tenth."""
    others = sum(pair.repeat for pair in pairs if not isinstance(pair.repeat, Auto))
    fitted = max(1, round(others / 9 / max(1, sum(isinstance(pair.repeat, Auto) for pair in pairs))))
    times = ((pair, fitted if isinstance(pair.repeat, Auto) else pair.repeat) for pair in pairs)
    return [pair for pair, count in times for _ in range(count)]


def _shares(train: Sequence[Pair]) -> list[str]:
    counts = Counter(pair.name for pair in train)
    return [f"{name} {count:,} ({count / len(train):.0%})" for name, count in counts.items()]


def _sentences(sets: dict[str, EvalSet]) -> str:
    """How many sentences, all in all and by name."""
    total = sum(len(found.sources) for found in sets.values())
    names = ", ".join(f"{name} {len(found.sources):,}" for name, found in sets.items()) if len(sets) > 1 else ""
    return f"{total:,} sentences" + f" ({names})" * bool(names)


def _split(recipe: Recipe, base: Path, say: Say) -> Split:
    def load(entries: Sequence[object]) -> list[Pair]:
        pairs = load_corpora(entries, recipe.source_language, recipe.target_language, base, say) if entries else []
        sides: tuple[tuple[Side, str], ...] = (("source", recipe.source_language), ("target", recipe.target_language))
        for side, code in sides:
            if recipe.simplify_chinese and language(code).script == "Hans":
                pairs = simplify(pairs, side)
        return pairs

    train = load(recipe.corpora) if recipe.corpora else load_corpora([], "", "", base)
    if recipe.split.dev or recipe.split.test:
        dev, test = load(recipe.split.dev), load(recipe.split.test)
        if any(pair.repeat != 1 for pair in (*dev, *test)):
            raise UserError("split: repeat is for training text; leave it out of dev and test")
        return Split(train, dev, test)
    split, grown = top_up_dev(split_pairs(train, recipe.split.key), recipe.split.key)
    for line in grown:
        say(line)
    return split


def within(pairs: Sequence[Pair], tokenizer: Tokenizer, max_tokens: int) -> list[Pair]:
    """The pairs of which neither side is longer than `max_tokens`, end token included."""
    return [
        pair
        for pair in pairs
        if max(len(tokenizer.encode(pair.source)), len(tokenizer.encode(pair.target))) < max_tokens
    ]


def fits(pairs: Sequence[Pair], tokenizer: Tokenizer, max_tokens: int, say: Say) -> list[Pair]:
    """`within`, and says how many were dropped; raises `UserError` when none is left."""
    kept = within(pairs, tokenizer, max_tokens)
    say(f"- longer than {max_tokens} tokens  {len(pairs) - len(kept):,}")
    if not kept:
        raise UserError(f"training.max_tokens = {max_tokens}: every pair is longer")
    return kept


def vocabulary_text(pairs: Sequence[Pair], languages: tuple[str, str], slots: bool) -> list[str]:
    """The text a vocabulary is made from: each pair's sides, once, with spans that get a slot taken out."""
    pairs = [pair for pair in pairs if not pair.turned]
    if not slots:
        return [visible(text) for pair in pairs for text in (pair.source, pair.target)]
    sides = zip((0, 1), languages, strict=True)
    return [
        plain(protect(narrow(visible((pair.source, pair.target)[side]), code))[0], code)
        for side, code in sides
        for pair in pairs
    ]


def prepared(pairs: Sequence[Pair], tokenizer: Tokenizer, languages: tuple[str, str]) -> list[Pair]:
    """The pairs as the model sees them; see `translator.typed.sides`. `languages` are those of source and target."""
    forward, backward = Sides(tokenizer, *languages), Sides(tokenizer, *languages[::-1])
    found = []
    for pair in pairs:
        source, target = (backward if pair.turned else forward).pair(pair.source, pair.target)
        found.append(dataclasses.replace(pair, source=source, target=target))
    return found


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    alpha: float = 0.0,
    seed: int = 0,
    max_tokens: int | None = None,
    drop_final_mark: float = 0.0,
) -> Encoded:
    """Pairs as ids. With `alpha` above 0 the source is segmented at random, anew for each `seed`; the target never is,
    so that scores keep their meaning. A random segmentation over `max_tokens` is replaced by the usual one. A share
    `drop_final_mark` of the sources loses its full stop or question mark, while the target keeps its own: a mark that
    somebody didn't type then changes nothing."""
    texts = [pair.source for pair in pairs]
    if drop_final_mark:
        draw = random.Random(seed).random
        texts = [_without_final_mark(text) if draw() < drop_final_mark else text for text in texts]
    usual = [tokenizer.encode(text) for text in texts]
    sources = tokenizer.sample(texts, alpha, seed) if alpha else usual
    if max_tokens is not None:
        sources = [drawn if len(drawn) < max_tokens else plain for drawn, plain in zip(sources, usual, strict=True)]
    eos = tokenizer.eos_id
    return Encoded([[*source, eos] for source in sources], [tokenizer.encode(pair.target) for pair in pairs])


def _without_final_mark(text: str) -> str:
    """`text` without the one mark at its end; as it is where that isn't the end of a sentence of several words."""
    rest = text[:-1]
    if not rest or text[-1] not in ".!?。！？" or not (rest[-1].isalnum() or rest[-1] in "\"')"):
        return text
    return rest if len(rest) > 3 else text
