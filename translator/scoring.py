"""Teacher-forced scores of files of translations."""

import json
from collections.abc import Iterator
from pathlib import Path

from translator.console import input_lines, stream_name
from translator.errors import UserError
from translator.pipeline import Translator

Score = tuple[float, int]
# The sentences of a line and, for each candidate, the pieces of each sentence's translation.
Line = tuple[list[str], list[list[list[str]]]]


def score_files(translator: Translator, sources: Path, targets: Path) -> list[Score]:
    """(log-probability, tokens) of each line of `targets` given that line of `sources`, neither split in sentences.

    Raises `UserError` when the files have different numbers of lines or a line is too long for the model.
    """
    source_lines, target_lines = input_lines(sources), input_lines(targets)
    if len(source_lines) != len(target_lines):
        raise UserError(
            f"{stream_name(sources)} has {len(source_lines)} lines and {stream_name(targets)} has {len(target_lines)} "
            "lines; they must correspond"
        )
    return translator.score(source_lines, target_lines)


def read_candidates(path: Path) -> list[Line]:
    """What `translate --format jsonl` wrote; raises `UserError` naming the line that isn't of that form."""
    return [_candidate(stream_name(path), number, text) for number, text in enumerate(input_lines(path), 1)]


def score_candidates(translator: Translator, lines: list[Line]) -> list[Score]:
    """(log-probability, tokens) of each candidate of each line, summed over the line's sentences."""
    flat = [
        (source, tokens)
        for sentences, candidates in lines
        for candidate in candidates
        for source, tokens in zip(sentences, candidate, strict=True)
    ]
    scores: Iterator[Score] = iter(translator.score([source for source, _ in flat], [tokens for _, tokens in flat]))
    results = []
    for sentences, candidates in lines:
        for _ in candidates:
            parts = [next(scores) for _ in sentences]
            results.append((sum((log_prob for log_prob, _ in parts), 0.0), sum(tokens for _, tokens in parts)))
    return results


def _candidate(name: str, number: int, text: str) -> Line:
    try:
        record = json.loads(text)
        sentences = record["sentences"]
        candidates = [translation["tokens"] for translation in record["translations"]]
        if any(len(candidate) != len(sentences) for candidate in candidates):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{name}: line {number} is not what translate --format jsonl writes") from None
    return sentences, candidates
