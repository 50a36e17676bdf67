#!/usr/bin/env python3
"""Whether a model loops, says nothing, or says far too much or too little, on many lines.

Usage: scripts/check_pathologies.py --checkpoint DIR [--input FILE | --recipe small --data FOLDER] [--lines 10000]
                                    [--output results/pathologies.json] [--set beam_size=1 …]

Lines of a file, or of the source side of a recipe's training text, drawn by a fixed seed. Counted are

- loops: an n-gram of 1 to 4 units that stands four times in a row in the translation, of a line in which none does;
  units are characters (letters and digits), and words where there are spaces between them;
- empty: no text for a line with a letter;
- lengths: translations, in tokens with the end token, outside 0.3 to 3 times the mean ratio of the training pairs. The
  mean comes from the recipe's pairs, or from --mean-ratio.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import regex

from train.data import load_data
from train.recipe import read_recipe
from translator.pipeline import Translator
from translator.pipeline.text import goes_on_and_on
from translator.textio import atomic_write_bytes, read_lines
from translator.typed.sides import Sides

MOST = 3  # times in a row
SHORTEST_RATIO, LONGEST_RATIO, WITHIN = 0.3, 3.0, 0.999
SHOWN = 20


def mean_ratio(pairs: list[tuple[str, str]], translator: Translator) -> float:
    """Target tokens a source token, as the model sees them, end tokens counted: the mean over pairs."""
    tokenizer = translator.tokenizer
    sides = Sides(tokenizer, translator.config.source_language, translator.config.target_language)
    seen = [sides.pair(*pair) for pair in pairs]
    ratios = [(len(tokenizer.encode(target)) + 1) / (len(tokenizer.encode(source)) + 1) for source, target in seen]
    return sum(ratios) / len(ratios)


def check(translator: Translator, lines: list[str], mean: float, settings: dict[str, Any]) -> dict[str, Any]:
    """The counts, and examples."""
    found: dict[str, list[dict[str, str]]] = {"loops": [], "empty": [], "lengths": []}
    tokenizer = translator.tokenizer
    sides = Sides(tokenizer, translator.config.source_language, translator.config.target_language)
    windows = (lines[start : start + 512] for start in range(0, len(lines), 512))
    for texts, candidates in translator.windows(windows, **settings):
        for line, (best, *_) in zip(texts, candidates, strict=True):
            tokens = sum(len(tokenizer.encode(sides.source(source).text)) + 1 for source in best.sources)
            ratio = sum(map(len, best.tokens)) / max(tokens, 1) / mean
            example = {"line": line, "translation": best.text}
            if goes_on_and_on(best.text, MOST) and not goes_on_and_on(line, MOST):
                found["loops"].append(example)
            if not best.text.strip() and regex.search(r"\p{L}", line):
                found["empty"].append(example)
            elif not SHORTEST_RATIO <= ratio <= LONGEST_RATIO:
                found["lengths"].append(example | {"ratio": f"{ratio:.2f} of the mean"})
    counts = {name: len(examples) for name, examples in found.items()}
    return {
        "lines": len(lines),
        "mean_ratio": mean,
        **counts,
        "reached": not counts["loops"] and not counts["empty"] and counts["lengths"] <= (1 - WITHIN) * len(lines),
        "examples": {name: examples[:SHOWN] for name, examples in found.items()},
    }


def main() -> None:
    """Parses, translates, says; writes where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="by default the shipped model")
    parser.add_argument("--input", type=Path)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--data", type=Path, help="where the recipe's corpora are")
    parser.add_argument("--mean-ratio", type=float)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=NUMBER")
    parser.add_argument("--output", type=Path, help="a JSON file; each direction is an entry in it")
    given = parser.parse_args()
    translator = Translator.from_checkpoint(given.checkpoint)
    languages = translator.config.source_language, translator.config.target_language
    mean, lines = given.mean_ratio, read_lines(given.input) if given.input else []
    if mean is None or not lines:
        recipe, base = read_recipe(given.recipe)
        pairs = load_data(recipe, given.data or base, say=lambda line: None).train
        # A recipe's other direction will do: its pairs are turned round.
        here = (recipe.source_language, recipe.target_language) == languages
        straight = [pair for pair in pairs if not pair.turned]
        sides = dict((pair.source, pair.target) if here else (pair.target, pair.source) for pair in straight)
        drawn = random.Random(1).sample(sorted(sides.items()), min(len(sides), given.lines))
        lines = lines or [source for source, _ in drawn]
        mean = mean or mean_ratio(drawn, translator)
    settings = {key: json.loads(value) for key, value in (setting.split("=", 1) for setting in given.set)}
    figures = check(translator, [line for line in lines if line.strip()][: given.lines], mean, settings)
    print(json.dumps(figures, ensure_ascii=False, indent=2))
    if given.output:
        known = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
        text = json.dumps(known | {"-".join(languages): figures}, ensure_ascii=False, indent=2) + "\n"
        atomic_write_bytes(given.output, text.encode())


if __name__ == "__main__":
    main()
