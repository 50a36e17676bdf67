#!/usr/bin/env python3
"""Whether exports of the shipped model find the same tokens in CTranslate2 and Transformers, greedy and with beam 4.

Usage: scripts/check_export.py [--sentences 1000] [--output results/export.json]

The sentences are held-out ones of the default corpora. Where tokens differ, the reason is named with the sentence:
"tie", both have the same score to 1e-4, so that rounding decides; "cut", one of them reached the longest length, and
what becomes of targets cut there is each toolkit's own affair; else "other", and the script ends with status 1. Scores
are those of this project, teacher-forced; so are the logits (Transformers) and log-probabilities (CTranslate2) that the
greatest difference is stated of. Needs the packages ctranslate2 and transformers.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from decoding.models import held_out
from decoding.systems import END, PAD, START

from translator.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, read_checkpoint
from translator.export import export_checkpoint
from translator.padding import pad, padding
from translator.pipeline import Translator
from translator.textio import atomic_write_bytes

ROOT = Path(__file__).resolve().parent.parent
LONGEST, TIE, BATCH = 128, 1e-4, 50
SEARCHES = {"greedy": 1, "beam 4": 4}

Ids = list[list[int]]


class CTranslate2:
    """Tokens and log-probabilities of CTranslate2."""

    name = "ctranslate2"

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        import ctranslate2

        self.translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
        self.tokenizer = checkpoint.tokenizer

    def find(self, sources: Ids, beams: int) -> Ids:
        """The best target of each source."""
        results = self.translator.translate_batch(
            [self.tokenizer.pieces(source[:-1]) for source in sources],
            beam_size=beams,
            max_batch_size=BATCH,
            max_decoding_length=LONGEST,
            return_end_token=True,
        )
        return [self.tokenizer.ids(result.hypotheses[0]) for result in results]

    def furthest(self, checkpoint: Checkpoint, sources: Ids, targets: Ids) -> float:
        """The greatest difference of the targets' log-probabilities from the project's own."""
        pieces = self.tokenizer.pieces
        texts = [target[:-1] if target[-1] == END else target for target in targets]  # it adds the end token itself
        scored = self.translator.score_batch(
            [pieces(source[:-1]) for source in sources], [pieces(text) for text in texts], max_batch_size=BATCH
        )
        most = 0.0
        for source, text, found in zip(sources, texts, scored, strict=True):
            mine = log_probs(checkpoint, source, [*text, END])
            most = max(most, float((mine - torch.tensor(found.log_probs)).abs().max()))
        return most


class Transformers:
    """Tokens and logits of Transformers."""

    name = "transformers"

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        from transformers import AutoModelForSeq2SeqLM

        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder)

    def find(self, sources: Ids, beams: int) -> Ids:
        """The best target of each source."""
        found: Ids = []
        for start in range(0, len(sources), BATCH):
            batch = sources[start : start + BATCH]
            ids, hidden = pad(batch, PAD), padding([len(source) for source in batch])
            tokens = self.model.generate(
                ids, attention_mask=(~hidden).long(), num_beams=beams, max_length=LONGEST + 1, suppress_tokens=None
            )
            for row in tokens[:, 1:].tolist():
                found.append(row[: row.index(END) + 1] if END in row else row)
        return found

    def furthest(self, checkpoint: Checkpoint, sources: Ids, targets: Ids) -> float:
        """The greatest difference of any logit from the project's own."""
        most = 0.0
        for source, target in zip(sources, targets, strict=True):
            ids, given = torch.tensor([source]), torch.tensor([[START, *target[:-1]]])
            theirs = self.model(input_ids=ids, decoder_input_ids=given).logits
            most = max(most, float((theirs - checkpoint.model(ids, given)).abs().max()))
        return most


def log_probs(checkpoint: Checkpoint, source: list[int], target: list[int]) -> torch.Tensor:
    """`(T,)`, of each target token, teacher-forced."""
    given = torch.tensor([[START, *target[:-1]]])
    logits = checkpoint.model(torch.tensor([source]), given)[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(target).unsqueeze(1)).squeeze(1)


def why_different(checkpoint: Checkpoint, source: list[int], mine: list[int], theirs: list[int]) -> tuple[str, float]:
    """The reason's name, and by how much the scores differ."""
    one, two = (float(log_probs(checkpoint, source, tokens).mean()) for tokens in (mine, theirs))
    if mine[-1] != END or theirs[-1] != END:
        return "cut", abs(one - two)
    # At the first token that differs, for a greedy search never compares what comes after.
    at = next(place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    first = [float(log_probs(checkpoint, source, tokens[: at + 1])[-1]) for tokens in (mine, theirs)]
    gap = min(abs(one - two), abs(first[0] - first[1]))
    return ("tie" if gap < TIE else "other"), gap


def compared(system: Any, checkpoint: Checkpoint, lines: list[str], sources: Ids) -> dict[str, Any]:
    """What one toolkit finds beside what this project finds, by search."""
    figures: dict[str, Any] = {"version": version(system.name)}
    limits = {"max_length_factor": 0.0, "max_length_extra": LONGEST}
    for search, beams in SEARCHES.items():
        found = Translator(checkpoint).candidates(lines, split=False, beam_size=beams, **limits)
        mine = [checkpoint.tokenizer.ids(one.tokens[0]) for [one] in found]
        theirs = system.find(sources, beams)
        differences = []
        for number, (source, a, b) in enumerate(zip(sources, mine, theirs, strict=True)):
            if a != b:
                reason, gap = why_different(checkpoint, source, a, b)
                differences.append({"sentence": lines[number], "reason": reason, "score differs by": gap})
        reasons = [difference["reason"] for difference in differences]
        counts = {reason: reasons.count(reason) for reason in ("tie", "cut", "other")}
        figures[search] = {"sentences": len(lines), "equal": len(lines) - len(reasons), **counts}
        figures[search]["differences"] = differences
        if beams == 1:
            figures["greatest difference"] = system.furthest(checkpoint, sources, mine)
        print(f"{system.name}, {search}: {len(lines) - len(reasons)} of {len(lines)} equal, {counts}", file=sys.stderr)
    return figures


@torch.inference_mode()
def main() -> int:
    """Exports, compares, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "export.json")
    given = parser.parse_args()
    checkpoint = read_checkpoint(DEFAULT_CHECKPOINT)
    lines = held_out(given.sentences)
    sources = [[*checkpoint.tokenizer.encode(line), END] for line in lines]
    figures: dict[str, Any] = {"torch": torch.__version__.split("+")[0], "longest": LONGEST}
    with tempfile.TemporaryDirectory() as folder:
        for kind in (CTranslate2, Transformers):
            export_checkpoint(checkpoint, kind.name, Path(folder) / kind.name)
            figures[kind.name] = compared(kind(Path(folder) / kind.name, checkpoint), checkpoint, lines, sources)
    atomic_write_bytes(given.output, (json.dumps(figures, indent=2, ensure_ascii=False) + "\n").encode())
    return int(any(figures[kind.name][search]["other"] for kind in (CTranslate2, Transformers) for search in SEARCHES))


if __name__ == "__main__":
    sys.exit(main())
