"""`translator translate`: text, files and pipes."""

import sys
import time
from contextlib import closing
from enum import StrEnum
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Annotated

import typer

from translator.bounds import MOST_ROWS
from translator.commands.options import (
    BatchOption,
    BeamOption,
    CacheOption,
    CheckpointsOption,
    ComputeTypeOption,
    DeviceOption,
    EngineOption,
    ExactOption,
    FromOption,
    InputOption,
    OutputOption,
    SetOption,
    ThreadsOption,
    ToOption,
    WorkersOption,
    decode_config,
    load_translator,
)
from translator.console import Advance, check_outputs, input_windows, is_standard_stream, output_file, progress_bar
from translator.errors import UserError
from translator.textio import json_text

if TYPE_CHECKING:
    from translator.pipeline import Candidate
    from translator.pipeline.bulk import Report, Totals

EXAMPLES = (
    "translator translate 'How are you?'",
    "translator translate --from zh '你好吗？'",
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
    from_: FromOption = None,
    to: ToOption = None,
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
    workers: WorkersOption = None,
    threads: ThreadsOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error what it took.")] = False,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    compute_type: ComputeTypeOption = "auto",
    exact: ExactOption = False,
) -> None:
    """Translate text, a file or a pipe: N lines in, N lines out, in order.

    From a pipe, lines are translated as they arrive. - is standard input, and standard output for --output.

    --set changes the other search settings: length_penalty, no_repeat_ngram_size, max_in_a_row, temperature, top_k,
    top_p, seed, max_length_factor, max_length_extra, early_stopping, search.
    """
    if n_best > 1 and format is Format.text:
        raise UserError("--n-best: several translations a line need --format jsonl")
    if text and input:
        raise UserError("--input: give text as arguments or a file, not both")
    check_outputs(output=output)
    translator = load_translator(
        checkpoint,
        device,
        threads,
        batch_tokens,
        cache,
        workers,
        engine=engine,
        compute_type=compute_type,
        exact=exact,
        languages=(from_, to),
    )
    config = decode_config(translator, beam_size, n_best, sample, set_ or [])
    to_file = output is not None and not is_standard_stream(output)
    pace, done = Pace(), 0
    # A bar would run into translations on the same terminal; with a file there is nothing else to look at.
    with (
        output_file(output) as out,
        progress_bar("translating, lines", shown=to_file) as advance,
        input_windows(text, input, WINDOW) as windows,
        closing(
            translator.windows(
                windows, config, prefix=prefix, split=split, report=pace.report(advance), ready=windows.ready
            )
        ) as translated,
    ):
        for lines, found in translated:
            for number, (line, candidates) in enumerate(zip(lines, found, strict=True), done + 1):
                out.write((candidates[0].text if format is Format.text else _json(number, line, candidates)) + "\n")
            out.flush()
            done += len(lines)
    if stats:
        print(f"translator: {pace.summary()}", file=sys.stderr)


class Pace:
    """How fast a run goes, from now on."""

    def __init__(self) -> None:
        self._start, self._cpu = time.monotonic(), time.process_time()
        self._totals: Totals | None = None

    def report(self, advance: Advance) -> "Report":
        """What to call with a run's totals, so that `advance` shows them."""

        def report(totals: "Totals") -> None:
            self._totals = totals
            advance(totals.lines, None, self._rates(totals, time.monotonic() - self._start))

        return report

    def summary(self) -> str:
        """A line on the whole run."""
        seconds, cpu = time.monotonic() - self._start, time.process_time() - self._cpu
        most = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if (totals := self._totals) is None:
            return "nothing to translate"
        return (
            f"{totals.lines:,} lines, {totals.sentences:,} sentences, {totals.searched:,} different, "
            f"{totals.tokens:,} target tokens; {seconds:.1f} s, {cpu:.1f} CPU s, {self._rates(totals, seconds)}; "
            f"peak memory {most / 2**20:,.0f} MiB"
        )

    @staticmethod
    def _rates(totals: "Totals", seconds: float) -> str:
        return f"{totals.lines / seconds:,.0f} lines and {totals.tokens / seconds:,.0f} target tokens a second"


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
