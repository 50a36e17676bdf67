"""Validation: loss per token and real translations of held-out sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from train.batches import Encoded, collate, plan_epoch
from train.corpus import EvalSet
from train.loss import smoothed_cross_entropy
from translator.checkpoint import Checkpoint
from translator.config import DecodeConfig
from translator.metrics import Scores, corpus_scores
from translator.pipeline import Translator


@dataclass(slots=True)
class Validation:
    """`loss` in nats a target token, end token counted, without smoothing; corpus scores; the translations made."""

    loss: float
    scores: Scores
    hypotheses: list[str]

    def metric(self, name: str) -> float:
        """`bleu`, `chrf` or `loss`, turned so that more is better."""
        return -self.loss if name == "loss" else float(getattr(self.scores, name))


@torch.no_grad()
def dev_loss(checkpoint: Checkpoint, encoded: Encoded, batch_tokens: int) -> float:
    """Mean cross entropy a target token over a whole corpus."""
    model, tokenizer = checkpoint.model.eval(), checkpoint.tokenizer
    device = model.embedding.weight.device
    total, tokens = 0.0, 0
    for indices in plan_epoch(encoded, batch_tokens, seed=0, epoch=0):
        batch = collate(encoded, indices, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).to(device)
        memory = model.encode(batch.source, batch.source_padding)
        hidden = model.decode(batch.target_in, memory, batch.source_padding)
        logits = model.logits(hidden[batch.real])
        total += float(smoothed_cross_entropy(logits, batch.target_out[batch.real], 0.0))
        tokens += batch.tokens
    return total / max(tokens, 1)


def translate_set(checkpoint: Checkpoint, sources: Sequence[str], config: DecodeConfig) -> list[str]:
    """One translation a source."""
    return Translator(checkpoint).translate(sources, config)


def validate(
    checkpoint: Checkpoint, encoded: Encoded, dev: EvalSet, sentences: int, config: DecodeConfig, batch_tokens: int
) -> Validation:
    """Loss over `encoded`, BLEU and chrF over the first `sentences` of `dev`."""
    sources, references = dev.sources[:sentences], dev.references[:sentences]
    hypotheses = translate_set(checkpoint, sources, config)
    scores = corpus_scores(hypotheses, references, checkpoint.config.target_language)
    return Validation(dev_loss(checkpoint, encoded, batch_tokens), scores, hypotheses)
