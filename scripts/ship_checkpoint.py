#!/usr/bin/env python3
"""Makes a shipped checkpoint from a finished run: weights in half precision, scored as shipped, with a card and curves.

    scripts/ship_checkpoint.py RUN RECIPE --data FOLDER --first RUN… [--before CHECKPOINT] [--other NAME SOURCE TARGET]…

RUN is the folder of `translator train`, RECIPE its recipe, --first the run whose weights it began with, or several, the
oldest first: that in both directions, then those that went on from one another. The folder is
checkpoints/SOURCE-TARGET, figures go to results/model_SOURCE-TARGET.json, and the card repeats them. --before is a
checkpoint to compare with on the everyday test part, by paired bootstrap; --other is a test set in two files of lines.
"""

import argparse
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from sacrebleu.significance import PairedTest

from train.curves import picture, read_run
from train.data import load_data
from train.leakage import leakage
from train.recipe import read_recipe
from train.state import read_saved
from translator.checkpoint import DEFAULT_CHECKPOINT, WEIGHTS, read_checkpoint, replaced_folder, write_checkpoint
from translator.diagnostics.latency.report import machine_facts
from translator.languages import language
from translator.metrics import METRICS, corpus_scores
from translator.pipeline import Translator
from translator.textio import atomic_write_bytes, json_text

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 12  # of the everyday test part, every n-th: nobody chose them
TESTED = "everyday"
_PARTS = ("score", "mean", "ci", "p")


def main() -> None:
    """Converts, scores, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--first", type=Path, nargs="+", required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--other", nargs=3, action="append", default=[], metavar=("NAME", "SOURCE", "REFERENCE"))
    given = parser.parse_args()
    recipe, base = read_recipe(given.recipe, [], given.data)
    name = "-".join(language(code).primary for code in (recipe.source_language, recipe.target_language))
    folder = DEFAULT_CHECKPOINT.parent / name
    data = load_data(recipe, base, print)
    before = None
    if given.before is not None:
        before = Translator.from_checkpoint(given.before).translate(data.test_sets[TESTED].sources)
    checkpoint = read_checkpoint(given.run / "best")
    checkpoint.config = dataclasses.replace(checkpoint.config, decode=recipe.decode)
    half = {key: tensor.half() for key, tensor in checkpoint.model.state_dict().items()}
    shutil.rmtree(folder, ignore_errors=True)
    with replaced_folder(folder) as place:
        write_checkpoint(place, checkpoint, half)
    figures = _facts(given, recipe, folder, half)
    figures["leakage"] = leakage(given.recipe, [], given.data).lines()[0]
    translator = Translator.from_checkpoint(folder)
    sets = {key: (held.sources, held.references) for key, held in data.test_sets.items()}
    for key, *files in given.other:
        source, reference = (Path(path).read_text(encoding="utf-8").split("\n")[:-1] for path in files)
        sets[key] = (source, [[line] for line in reference])
    figures["tests"] = {}
    for key, (sources, references) in sets.items():
        own = key in data.test_sets
        for search, beams in (("greedy", 1), ("beam", recipe.decode.beam_size))[0 if own else 1 :]:
            began = time.perf_counter()
            found = translator.translate(sources, dataclasses.replace(recipe.decode, beam_size=beams))
            scores = corpus_scores(found, references, recipe.target_language)
            figures["tests"].setdefault(key, {"sentences": len(sources)})[search] = scores.figures()
            print(f"{key}, {search}: {scores.line(2)}  in {time.perf_counter() - began:.0f} s", flush=True)
        if key == TESTED:
            picked = range(0, len(sources), max(1, len(sources) // SAMPLES))
            figures["samples"] = [[sources[i], found[i], references[i][0]] for i in picked][:SAMPLES]
            if before is not None:
                figures["before"] = _compared(before, found, references, recipe.target_language)
    results = ROOT / "results" / f"model_{name}.json"
    atomic_write_bytes(results, (json_text(figures, indent=1) + "\n").encode())
    atomic_write_bytes(folder / "curves.png", picture([*map(read_run, given.first), read_run(given.run)], "png"))
    atomic_write_bytes(folder / "README.md", _card(figures, given.recipe, results.name).encode())


def _facts(given: argparse.Namespace, recipe: Any, folder: Path, half: dict[str, torch.Tensor]) -> dict[str, Any]:
    folders = [*given.first, given.run]
    runs = [read_saved(each / "last").counters for each in folders]
    starts = [next(record for record in read_run(each).records if record["event"] == "start") for each in folders]
    start = starts[-1]
    return {
        "source": recipe.source_language,
        "target": recipe.target_language,
        "steps": [counters.step for counters in runs],
        "best_step": read_saved(given.run / "best").counters.step,
        "hours": [round(counters.seconds / 3600, 2) for counters in runs],
        "learning_rates": [record["recipe"]["training"]["learning_rate"] for record in starts],
        "target_tokens": [counters.target_tokens for counters in runs],
        "pairs": start["pairs"],
        "parameters": sum(tensor.numel() for tensor in half.values()),
        "megabytes": round((folder / WEIGHTS).stat().st_size / 1e6, 1),
        "model": start["model"],
        "machine": machine_facts(torch.device("cpu")),
    }


def _compared(before: list[str], after: list[str], references: list[list[str]], code: str) -> dict[str, Any]:
    """Both systems' scores with 95 % confidence by paired bootstrap (Koehn 2004), and p."""
    most = max(map(len, references))
    streams = [[versions[i] if i < len(versions) else None for versions in references] for i in range(most)]
    metrics = {name: kind.make(code) for name, kind in METRICS.items()}
    _, found = PairedTest([("before", before), ("after", after)], metrics, streams, test_type="bs", n_samples=1000)()
    return {
        key: [
            {name: None if value is None else float(value) for name, value in zip(_PARTS, values, strict=True)}
            for values in ((r.score, r.mean, r.ci, r.p_value) for r in results)
        ]
        for key, results in found.items()
        if key != "System"
    }


def _card(figures: dict[str, Any], recipe: str, results: str) -> str:
    names = {"en": "English", "zh": "Chinese (simplified)"}
    rows = [
        f"| {key} ({test['sentences']:,} lines) | "
        + " | ".join(_cells(test.get(search)) for search in ("greedy", "beam"))
        + " |"
        for key, test in figures["tests"].items()
    ]
    test = next(iter(figures["tests"].values()))["beam"]
    samples = [f"* {source}  \n  → {found}  \n  reference: {right}" for source, found, right in figures["samples"]]
    tries = Path(__file__).with_name(f"tries_{recipe}.md")
    text = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return text.format(
        **{key: value for key, value in figures.items() if key not in ("tests", "samples")},
        source_name=names[figures["source"]],
        target_name=names[figures["target"]],
        recipe=recipe,
        results=results,
        cpu=figures["machine"].get("cpu", "CPU"),
        scores="\n".join(rows),
        bleu_signature=test["bleu_signature"],
        chrf_signature=test["chrf_signature"],
        shown="\n".join(samples),
        tries=tries.read_text(encoding="utf-8") if tries.exists() else "",
        comparison=_comparison(figures),
        millions=figures["parameters"] / 1e6,
        first_steps=figures["steps"][0],
        first_tokens=figures["target_tokens"][0] / 1e6,
        first_hours=figures["hours"][0],
        then=_then(figures),
        then_hours=sum(figures["hours"][1:]),
        all_tokens=sum(figures["target_tokens"]) / 1e6,
    )


def _then(figures: dict[str, Any]) -> str:
    """The runs in one direction, one after another."""
    runs = zip(figures["steps"][1:], figures["target_tokens"][1:], figures["learning_rates"][1:], strict=True)
    return "; ".join(f"{steps:,} steps from a rate of {rate:g}, {tokens / 1e6:.1f} M" for steps, tokens, rate in runs)


def _cells(scores: dict[str, Any] | None) -> str:
    return "| " if scores is None else f"{scores['bleu']:.1f} | {scores['chrf']:.1f}"


def _comparison(figures: dict[str, Any]) -> str:
    if "before" not in figures:
        return ""
    one, two = next(values for key, values in figures["before"].items() if key.upper() == "BLEU")
    return (
        f"\nThe model shipped before has BLEU {one['score']:.1f} on the everyday test part, this one "
        f"{two['score']:.1f}; paired bootstrap, 1,000 samples: "
        f"{two['mean']:.1f} ± {two['ci']:.1f}, p = {two['p']:.3f}.\n"
    )


if __name__ == "__main__":
    main()
