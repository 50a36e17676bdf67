#!/usr/bin/env python3
"""How a model takes input as people type it: what must come through, and variants of one sentence.

Usage: scripts/check_typed.py --checkpoint DIR [--recipe small] [--output results/typed.json]

Lines of tests/data/typed.tsv in the checkpoint's direction: `spans` counts those whose numbers, dates, money,
addresses, placeholders, tags, emoji, … are in the translation as often as in the line and none of them behind its last
mark, where what the model lost is put; `forms` those that translate like the line typed plainly. Then 200 sentences of
the test part of `--recipe`: chrF of each variant (capitals, no final mark, …) beside that of the plain sentences.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import regex

from train.data import load_data
from train.recipe import read_recipe
from translator.metrics import corpus_scores
from translator.pipeline import Translator
from translator.textio import atomic_write_bytes

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "tests" / "data" / "typed.tsv"
SENTENCES = 200
WITHIN = 2.0  # points of chrF
FEWEST = 0.98  # of the lines with spans
MARKS = ".!?。！？…"


def typed_lines(direction: str) -> list[tuple[str, str, str, list[str]]]:
    """Kind, line as typed, plain line and what must come through. `[U+00AD]` in the file is that character."""

    def read(cell: str) -> str:
        return regex.sub(r"\[U\+([0-9A-F]+)\]", lambda found: chr(int(found[1], 16)), cell)

    rows = (line.split("\t") for line in LINES.read_text(encoding="utf-8").splitlines())
    return [(kind, read(typed), read(plain), [*map(read, kept)]) for where, kind, typed, plain, *kept in rows
            if where == direction]  # fmt: skip


def is_intact(kind: str, line: str, translation: str, kept: Sequence[str]) -> bool:
    """Whether each span is there as often as it was typed, in the order of tags, and not behind the last mark."""
    if any(translation.count(span) < max(1, kept.count(span)) for span in kept):
        return False
    if kind == "tag" and [*map(translation.find, kept)] != sorted(map(translation.find, kept)):
        return False
    if kind == "list":
        return True
    # Behind the mark belongs what was typed there, an emoji say.
    last, typed_last = (_last_mark(text.rstrip(MARKS)) for text in (translation, line))
    behind = [span for span in kept if 0 <= last < translation.rfind(span) and translation.count(span) == 1]
    return all(0 <= typed_last < line.rfind(span) for span in behind)


def _last_mark(text: str) -> int:
    return max((found.start() for found in regex.finditer(r"[!?。！？]|\.(?=\s|\\|$)", text)), default=-1)


def on_typed_lines(translator: Translator, direction: str) -> dict[str, Any]:
    """The two shares over all lines and by kind, and what failed."""
    rows = typed_lines(direction)
    typed = translator.translate([row[1] for row in rows])
    plain = translator.translate([row[2] for row in rows])
    kinds: dict[str, list[bool]] = defaultdict(list)
    failed = []
    for (kind, line, _, kept), mine, other in zip(rows, typed, plain, strict=True):
        right = is_intact(kind, line, mine, kept) if kept else mine == other
        kinds[("spans " if kept else "forms ") + kind].append(right)
        if not right:
            failed.append(
                {"kind": kind, "line": line, "translation": mine, **({"keep": kept} if kept else {"plain": other})}
            )
    whole = {
        what: [right for kind, found in kinds.items() if kind.startswith(what) for right in found]
        for what in ("spans", "forms")
    }
    return {
        **{what: {"lines": len(found), "right": sum(found)} for what, found in whole.items()},
        "kinds": {kind: f"{sum(found)}/{len(found)}" for kind, found in kinds.items()},
        "failed": failed,
    }


def _hidden(text: str, draw: random.Random) -> str:
    for _ in range(3):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice("\u00ad\u200b\u200e\u2060\ufeff\ufe0f\x07") + text[place:]
    return text


def _curly(text: str, spaced: bool) -> str:
    if spaced:
        text = text.replace("'", "’")
        return regex.sub(r'"([^"]*)"', r"“\1”", text)
    return regex.sub(r'["“]([^"“”]*)["”]', r"「\1」", text)


def variants(spaced: bool) -> dict[str, Callable[[str, random.Random], str]]:
    """Ways to type one sentence: of a language that puts spaces between its words, or of one that doesn't."""
    wide = {ord(char): ord(char) + 0xFEE0 for char in map(chr, range(0x21, 0x7F)) if spaced or char.isalnum()}
    half = str.maketrans("，。？！；：", ",.?!;:")
    shared: dict[str, Callable[[str, random.Random], str]] = {
        "invisible": _hidden,
        "no mark": lambda text, _: text.rstrip(MARKS) or text,
        "quotes": lambda text, _: _curly(text, spaced),
        "space before the mark": lambda text, _: regex.sub(r"(?<=\w)([.?!。？！])$", r" \1", text),
        "full width" if spaced else "half-width marks": lambda text, _: text.translate(wide if spaced else half),
    }
    if not spaced:
        return shared
    return shared | {
        "capitals": lambda text, _: text.upper(),
        "no capitals": lambda text, _: text.lower(),
        "title": lambda text, _: " ".join(word[:1].upper() + word[1:] for word in text.split(" ")),
    }


def on_sentences(translator: Translator, sources: list[str], references: list[list[str]]) -> dict[str, Any]:
    """chrF of each variant, of the plain sentences and how many translate alike; all of them for what nobody sees."""
    language = translator.config.target_language
    plain = translator.translate(sources)

    def chrf(texts: list[str]) -> float:
        return corpus_scores(texts, references, language)["chrf"].value

    figures: dict[str, Any] = {"sentences": len(sources), "plain": {"chrf": chrf(plain)}}
    spaced = translator.config.source_language.startswith("en")
    for name, typed in variants(spaced).items():
        draw = random.Random(name)
        texts = translator.translate([typed(text, draw) for text in sources])
        alike = sum(mine == other for mine, other in zip(texts, plain, strict=True))
        figures[name] = {"chrf": chrf(texts), "alike": alike}
    return figures


def verdict(figures: dict[str, Any]) -> dict[str, bool]:
    """Each target, and whether it is reached."""
    lines, sentences = figures["lines"], figures["sentences"]
    plain = sentences["plain"]["chrf"]
    found = {f"{name}: within {WITHIN:g}": plain - part["chrf"] <= WITHIN
             for name, part in sentences.items() if name not in ("sentences", "plain")}  # fmt: skip
    found["invisible: identical"] = sentences["invisible"]["alike"] == sentences["sentences"]
    found[f"spans: {FEWEST:.0%}"] = lines["spans"]["right"] >= FEWEST * lines["spans"]["lines"]
    return found


def show(figures: dict[str, Any]) -> None:
    """For people."""
    lines, sentences = figures["lines"], figures["sentences"]
    for what in ("spans", "forms"):
        part = lines[what]
        print(f"{what}: {part['right']}/{part['lines']} ({part['right'] / part['lines']:.1%})")
    print("  ".join(f"{kind} {found}" for kind, found in lines["kinds"].items()))
    for one in lines["failed"]:
        print(
            f"  {one['kind']}: {one['line']!r} → {one['translation']!r}"
            + (f", not {one['plain']!r}" if "plain" in one else "")
        )
    for name, part in sentences.items():
        if name != "sentences":
            print(
                f"{name:<22} chrF {part['chrf']:.1f}"
                + (f"  {part['alike']}/{sentences['sentences']} alike" if "alike" in part else "")
            )
    for target, reached in figures["targets"].items():
        print(("reached   " if reached else "MISSED    ") + target)


def main() -> None:
    """Parses, translates, says; writes where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="by default the shipped model")
    parser.add_argument("--recipe", default="small", help="whose test part gives the sentences")
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--output", type=Path, help="a JSON file; each direction is an entry in it")
    given = parser.parse_args()
    translator = Translator.from_checkpoint(given.checkpoint)
    direction = f"{translator.config.source_language}-{translator.config.target_language}"
    test = load_data(*read_recipe(given.recipe), say=lambda line: None).test
    sources, references = test.sources[: given.sentences], test.references[: given.sentences]
    if direction == "zh-en":
        sources, references = [versions[0] for versions in references], [[source] for source in sources]
    figures: dict[str, Any] = {
        "lines": on_typed_lines(translator, direction),
        "sentences": on_sentences(translator, sources, references),
    }
    figures["targets"] = verdict(figures)
    show(figures)
    if given.output:
        known = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
        text = json.dumps(known | {direction: figures}, ensure_ascii=False, indent=2) + "\n"
        atomic_write_bytes(given.output, text.encode())


if __name__ == "__main__":
    main()
