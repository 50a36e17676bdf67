#!/usr/bin/env python3
"""Makes checkpoints/en-zh from a finished run: weights in half precision, scored after the conversion, with a card.

Usage: scripts/ship_checkpoint.py RUN [RECIPE]     RUN is the folder of `translator train`, RECIPE its recipe.

The scores are those of the shipped files on the test part of the recipe's corpora, greedy and with the default beam,
and go to results/default_model.json; the card repeats them. Training hours and steps come from the run.
"""

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

import torch

from train.data import load_data
from train.recipe import read_recipe
from train.state import read_saved
from translator.checkpoint import DEFAULT_CHECKPOINT, WEIGHTS, read_checkpoint, replaced_folder, write_checkpoint
from translator.diagnostics.latency.report import machine_facts
from translator.metrics import corpus_scores
from translator.pipeline import Translator
from translator.textio import atomic_write_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "default_model.json"

CARD = ROOT / "scripts" / "model_card.md"


def main(run: Path, recipe_name: str = "small") -> None:
    """Converts, scores, writes."""
    recipe, base = read_recipe(recipe_name)
    counters = read_saved(run / "best").counters
    checkpoint = read_checkpoint(run / "best")
    half = {name: tensor.half() for name, tensor in checkpoint.model.state_dict().items()}
    shutil.rmtree(DEFAULT_CHECKPOINT, ignore_errors=True)
    with replaced_folder(DEFAULT_CHECKPOINT) as folder:
        write_checkpoint(folder, checkpoint, half)
    data = load_data(recipe, base, print)
    translator = Translator.from_checkpoint()
    figures: dict[str, object] = {
        "recipe": recipe_name,
        "step": counters.step,
        "steps": recipe.training.max_steps,
        "hours": read_saved(run / "last").counters.seconds / 3600,
        "pairs": len(data.train),
        "sentences": len(data.test.sources),
        "megabytes": (DEFAULT_CHECKPOINT / WEIGHTS).stat().st_size / 1e6,
        "parameters": sum(tensor.numel() for tensor in half.values()) / 1e6,
        "beam_size": recipe.decode.beam_size,
        **dataclasses.asdict(checkpoint.config.model),
        "machine": machine_facts(torch.device("cpu")),
    }
    for name, beams in (("greedy", 1), ("beam", recipe.decode.beam_size)):
        began = time.perf_counter()
        hypotheses = translator.translate(data.test.sources, dataclasses.replace(recipe.decode, beam_size=beams))
        scores = corpus_scores(hypotheses, data.test.references, recipe.target_language)
        figures |= scores.figures(f"{name}_")
        print(f"{name}: {scores.line(2)}  in {time.perf_counter() - began:.0f} s")
    RESULTS.parent.mkdir(exist_ok=True)
    atomic_write_bytes(RESULTS, (json.dumps(figures, indent=2) + "\n").encode())
    atomic_write_bytes(DEFAULT_CHECKPOINT / "README.md", CARD.read_text(encoding="utf-8").format(**figures).encode())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:3])
