"""BLEU and chrF by sacreBLEU, with the signatures that make a figure comparable."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from translator.arguments import item_list, text_list
from translator.errors import UserError
from translator.languages import language as language_of


@dataclass(frozen=True, slots=True)
class Scores:
    """Corpus scores, 0 to 100, and how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def bleu_tokenizer(language: str) -> str:
    """sacreBLEU's tokenizer for a target language, by its code; raises `UserError` for an unknown one."""
    return language_of(language).bleu_tokenizer


def corpus_scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]], language: str) -> Scores:
    """BLEU and chrF of `hypotheses` against each one's `references`, at least one of them.

    Raises `UserError` when the counts differ, a sentence has no reference, there is nothing to score or the language's
    code is unknown; `TypeError` for a single string where a list of texts belongs.
    """
    hypotheses, references = text_list(hypotheses, "hypotheses"), item_list(references, "references")
    references = [text_list(versions, f"references of sentence {n}") for n, versions in enumerate(references, 1)]
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} hypotheses and {len(references)} references: there must be as many of each")
    if not hypotheses:
        raise UserError("there is nothing to score: no lines")
    for number, versions in enumerate(references, 1):
        if not versions:
            raise UserError(f"sentence {number} has no reference")
    most = max(len(versions) for versions in references)
    # One stream for the first reference of each sentence, one for the second, …; sacreBLEU skips the gaps.
    streams: Any = [[versions[i] if i < len(versions) else None for versions in references] for i in range(most)]
    bleu, chrf = BLEU(tokenize=bleu_tokenizer(language)), CHRF()
    scores = [metric.corpus_score(list(hypotheses), streams).score for metric in (bleu, chrf)]
    return Scores(scores[0], scores[1], str(bleu.get_signature()), str(chrf.get_signature()))
