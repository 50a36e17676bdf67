"""`translator translate`: text, files and pipes."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from translator.bounds import MOST_ROWS
from translator.commands.options import (
    BatchOption,
    BeamOption,
    CacheOption,
    CheckpointsOption,
    DeviceOption,
    InputOption,
    OutputOption,
    SetOption,
    ThreadsOption,
    decode_config,
    load_translator,
)
from translator.console import check_outputs, input_windows, is_standard_stream, output_file, progress_bar
from translator.errors import UserError
from translator.textio import json_text

if TYPE_CHECKING:
    from translator.pipeline import Candidate

EXAMPLES = (
    "translator translate 'How are you?'",
    "translator translate --input en.txt --output zh.txt --beam-size 5",
    "tail -f log.en | translator translate",
)


WINDOW = 1024


class Format(StrEnum):
    """What `translate` writes."""

    text = "text"
    jsonl = "jsonl"


def run(
    text: Annotated[
        list[str] | None, typer.Argument(help="Text to translate; else --input, else stdin, as for -.")
    ] = None,
    checkpoint: CheckpointsOption = None,
    input: InputOption = None,
    output: OutputOption = None,
    format: Annotated[Format, typer.Option(help="Plain text, or JSON lines with scores and tokens.")] = Format.text,
    beam_size: BeamOption = None,
    n_best: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Translations a line (JSON lines only).")] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of searching.")] = False,
    prefix: Annotated[str, typer.Option(help="How every translation must begin.")] = "",
    split: Annotated[bool, typer.Option(help="Split lines of several sentences and join their translations.")] = True,
    set_: SetOption = None,
    cache: CacheOption = None,
    batch_tokens: BatchOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Translate text, a file or a pipe: N lines in, N lines out, in order.

    From a pipe, lines are translated as they arrive. - is standard input, and standard output for --output.

    --set changes the other search settings: length_penalty, no_repeat_ngram_size, temperature, top_k, top_p, seed,
    max_length_factor, max_length_extra, early_stopping, search.
    """
    if n_best > 1 and format is Format.text:
        raise UserError("--n-best: several translations a line need --format jsonl")
    if text and input:
        raise UserError("--input: give text as arguments or a file, not both")
    check_outputs(output=output)
    translator = load_translator(checkpoint, device, threads, batch_tokens, cache)
    config = decode_config(translator, beam_size, n_best, sample, set_ or [])
    to_file = output is not None and not is_standard_stream(output)
    done = 0
    # A bar would run into translations on the same terminal; with a file there is nothing else to look at.
    with output_file(output) as out, progress_bar("translating, lines", shown=to_file) as advance:
        for lines in input_windows(text, input, WINDOW):
            found = translator.candidates(
                lines,
                config,
                prefixes=[prefix] * len(lines) if prefix else None,
                split=split,
                first_line=done + 1,
                progress=lambda now, _, before=done: advance(before + now, None),  # type: ignore[misc]
            )
            for number, (line, candidates) in enumerate(zip(lines, found, strict=True), done + 1):
                out.write((candidates[0].text if format is Format.text else _json(number, line, candidates)) + "\n")
            out.flush()
            done += len(lines)


def _json(number: int, source: str, candidates: "list[Candidate]") -> str:
    return json_text(
        {
            "line": number,
            "source": source,
            "sentences": candidates[0].sources,
            "translations": [
                {"text": c.text, "log_prob": c.log_prob, "score": c.score, "tokens": c.tokens} for c in candidates
            ],
        }
    )
