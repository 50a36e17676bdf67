"""Validation: loss per token and real translations of held-out sentences."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from train.batches import Encoded, collate, plan_epoch
from train.corpus import EvalSet
from train.loss import smoothed_cross_entropy
from train.recipe import LOSS
from translator.checkpoint import Checkpoint
from translator.config import DecodeConfig
from translator.metrics import METRICS, Scores, corpus_scores
from translator.pipeline import Translator


@dataclass(slots=True)
class SetScores:
    """Scores of held-out sets: of all their sentences together, and `named`, by set, where there are several.

    `samples` are source, translation and references of the first sentences of each.
    """

    scores: Scores
    named: dict[str, Scores]
    samples: list[tuple[str, str, list[str]]]

    def metric(self, name: str) -> float:
        """A metric's value: of all sentences, or the mean over named sets, so that a small one counts as much."""
        values = [scores[name].value for scores in self.named.values() or [self.scores]]
        return sum(values) / len(values)

    def line(self) -> str:
        """The scores for people."""
        parts = [f"{name} {scores.line(gap=' ')}" for name, scores in self.named.items()]
        return self.scores.line() + f"  ({'; '.join(parts)})" * bool(parts)

    def figures(self) -> dict[str, dict[str, float]]:
        """The named scores for a log."""
        return {name: {key: score.value for key, score in scores.items()} for name, scores in self.named.items()}


@dataclass(slots=True)
class Validation:
    """`loss` in nats a target token, end token counted, without smoothing; scores of real translations."""

    loss: float
    result: SetScores

    def metric(self, name: str) -> float:
        """The loss or a metric, turned so that more is better."""
        if name == LOSS:
            return -self.loss
        return self.result.metric(name) if METRICS[name].more_is_better else -self.result.metric(name)


@torch.no_grad()
def dev_loss(checkpoint: Checkpoint, encoded: Encoded, batch_tokens: int) -> float:
    """Mean cross entropy a target token over a whole corpus."""
    model, tokenizer = checkpoint.model.eval(), checkpoint.tokenizer
    device = model.embedding.weight.device
    total, tokens = 0.0, 0
    for indices in plan_epoch(encoded, batch_tokens, seed=0, epoch=0):
        batch = collate(encoded, indices, tokenizer.bos_id, tokenizer.eos_id, device)
        hidden = model.packed(batch.source, batch.target_in, batch.source_packing, batch.target_packing)
        total += float(smoothed_cross_entropy(model.logits(hidden), batch.target_out, 0.0))
        tokens += batch.tokens
    return total / max(tokens, 1)


def score_sets(
    checkpoint: Checkpoint,
    sets: Mapping[str, EvalSet],
    config: DecodeConfig,
    sentences: int | None = None,
    shown: int = 0,
) -> SetScores:
    """Every metric over the first `sentences` of each set; `shown` of each are the samples."""
    translator, language = Translator(checkpoint), checkpoint.config.target_language
    named, samples = {}, []
    all_texts: list[str] = []
    all_references: list[list[str]] = []
    for name, held in sets.items():
        texts = translator.translate(held.sources[:sentences], config)
        references = held.references[:sentences]
        named[name] = corpus_scores(texts, references, language)
        samples += list(zip(held.sources, texts, references, strict=False))[:shown]
        all_texts += texts
        all_references += references
    scores = corpus_scores(all_texts, all_references, language)
    return SetScores(scores, named if len(named) > 1 else {}, samples)
