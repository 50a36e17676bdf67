"""BLEU and chrF by sacreBLEU, with the signatures that make a figure comparable."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from translator.arguments import item_list, text_list
from translator.errors import UserError
from translator.languages import language as language_of


class Metric(NamedTuple):
    """A corpus metric: what people call it, sacreBLEU's implementation for a target language, and its direction."""

    label: str
    make: Callable[[str], Any]
    more_is_better: bool = True


METRICS: dict[str, Metric] = {
    "bleu": Metric("BLEU", lambda language: BLEU(tokenize=bleu_tokenizer(language))),
    "chrf": Metric("chrF", lambda language: CHRF()),
}
"""Every metric by the name that recipes, logs and results give it; the command line prints them all."""


class Score(NamedTuple):
    """One metric's value, 0 to 100, and how it was computed."""

    value: float
    signature: str


class Scores(dict[str, Score]):
    """Corpus scores by the names of `METRICS`."""

    def figures(self, prefix: str = "") -> dict[str, float | str]:
        """Values and signatures for a log: `{prefix}bleu`, …, `bleu_signature`, …."""
        values: dict[str, float | str] = {f"{prefix}{name}": score.value for name, score in self.items()}
        return values | {f"{name}_signature": score.signature for name, score in self.items()}

    def line(self, digits: int = 1, gap: str = "  ") -> str:
        """The values for people: `BLEU 28.6  chrF 24.6`."""
        return gap.join(f"{METRICS[name].label} {score.value:.{digits}f}" for name, score in self.items())


def bleu_tokenizer(language: str) -> str:
    """sacreBLEU's tokenizer for a target language, by its code; raises `UserError` for an unknown one."""
    return language_of(language).bleu_tokenizer


def corpus_scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]], language: str) -> Scores:
    """Every metric of `hypotheses` against each one's `references`, at least one of them.

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
    scores = Scores()
    for name, kind in METRICS.items():
        metric = kind.make(language)
        value = metric.corpus_score(list(hypotheses), streams).score
        scores[name] = Score(value, str(metric.get_signature()))
    return scores
