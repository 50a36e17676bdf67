"""Teacher-forced scores of files of translations."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, StrictStr, ValidationError

from translator.console import input_lines, stream_name
from translator.errors import UserError
from translator.pipeline import Translator
from translator.pipeline.translator import Progress

Score = tuple[float, int]


class Candidate(BaseModel):
    """One translation of a line: the pieces of each sentence's translation."""

    tokens: list[list[StrictStr]]


class Line(BaseModel):
    """What scoring needs of a line that `translate --format jsonl` wrote: its sentences and their translations."""

    sentences: list[StrictStr]
    translations: list[Candidate]


def score_files(translator: Translator, sources: Path, targets: Path, progress: Progress | None = None) -> list[Score]:
    """(log-probability, tokens) of each line of `targets` given that line of `sources`, neither split in sentences.

    Raises `UserError` when the files have different numbers of lines or a line is too long for the model.
    """
    source_lines, target_lines = input_lines(sources), input_lines(targets)
    if len(source_lines) != len(target_lines):
        raise UserError(
            f"{stream_name(sources)} has {len(source_lines)} lines and {stream_name(targets)} has {len(target_lines)} "
            "lines; they must correspond"
        )
    return translator.score(source_lines, target_lines, progress=progress)


def read_candidates(path: Path) -> list[Line]:
    """What `translate --format jsonl` wrote; raises `UserError` naming the line that isn't of that form."""
    return [_line(stream_name(path), number, text) for number, text in enumerate(input_lines(path), 1)]


def score_candidates(translator: Translator, lines: list[Line], progress: Progress | None = None) -> list[Score]:
    """(log-probability, tokens) of each candidate of each line, summed over the line's sentences."""
    flat = [
        (number, source, tokens)
        for number, line in enumerate(lines, 1)
        for candidate in line.translations
        for source, tokens in zip(line.sentences, candidate.tokens, strict=True)
    ]
    scores: Iterator[Score] = iter(
        translator.score(
            [source for _, source, _ in flat],
            [tokens for _, _, tokens in flat],
            line_numbers=[number for number, _, _ in flat],
            progress=progress,
        )
    )
    results = []
    for line in lines:
        for _ in line.translations:
            parts = [next(scores) for _ in line.sentences]
            results.append((sum((log_prob for log_prob, _ in parts), 0.0), sum(tokens for _, tokens in parts)))
    return results


def _line(name: str, number: int, text: str) -> Line:
    try:
        line = Line.model_validate_json(text)
        if any(len(candidate.tokens) != len(line.sentences) for candidate in line.translations):
            raise ValueError
    except (ValidationError, ValueError):
        raise UserError(f"{name}: line {number} is not what translate --format jsonl writes") from None
    return line
