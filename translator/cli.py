"""The command line: parses, calls, prints. What it calls lives elsewhere."""

import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from translator.console import input_windows, output_file, progress_bar, show
from translator.errors import UserError

if TYPE_CHECKING:
    from translator.config import DecodeConfig
    from translator.pipeline import Candidate, Translator

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

WINDOW = 1024


class Format(StrEnum):
    """What `translate` writes."""

    text = "text"
    jsonl = "jsonl"


CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Folder of the model; by default the one shipped with the project.")
]
InputOption = Annotated[Path | None, typer.Option("--input", help="UTF-8 text, a sentence or paragraph a line.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="File to write, whole or not at all.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default PyTorch's.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
BeamOption = Annotated[
    int | None, typer.Option("--beam-size", min=1, help="Beams; 1 is greedy. By default the checkpoint's setting.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one setting.")]


@app.command(
    epilog="Examples: [bold]translator translate 'How are you?'[/]  ·  "
    "[bold]translator translate --input en.txt --output zh.txt --beam-size 5[/]  ·  "
    "[bold]tail -f log.en | translator translate[/]"
)
def translate(
    text: Annotated[list[str] | None, typer.Argument(help="Text to translate; else --input, else stdin.")] = None,
    checkpoint: CheckpointOption = None,
    input: InputOption = None,
    output: OutputOption = None,
    format: Annotated[Format, typer.Option(help="Plain text, or JSON lines with scores and tokens.")] = Format.text,
    beam_size: BeamOption = None,
    n_best: Annotated[int, typer.Option(min=1, help="Translations a line (JSON lines only).")] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of searching.")] = False,
    prefix: Annotated[str, typer.Option(help="How every translation must begin.")] = "",
    split: Annotated[bool, typer.Option(help="Split lines of several sentences and join their translations.")] = True,
    set_: SetOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Translate text, a file or a pipe: N lines in, N lines out, in order.

    From a pipe, lines are translated as they arrive. --set changes the other search settings: length_penalty,
    no_repeat_ngram_size, temperature, top_k, top_p, seed, max_length_factor, max_length_extra, early_stopping.
    """
    if n_best > 1 and format is Format.text:
        raise UserError("--n-best: several translations a line need --format jsonl")
    if text and input:
        raise UserError("--input: give text as arguments or a file, not both")
    translator = _translator(checkpoint, device, threads)
    config = _decode_config(translator, beam_size, n_best, sample, set_ or [])
    done = 0
    # A bar would run into translations on the same terminal; with a file there is nothing else to look at.
    with output_file(output) as out, progress_bar("translating", shown=output is not None) as progress:
        for lines in input_windows(text, input, WINDOW):
            prefixes = [prefix] * len(lines) if prefix else None
            found = translator.candidates(lines, config, prefixes=prefixes, split=split, first_line=done + 1)
            for line, candidates in zip(lines, found, strict=True):
                done += 1
                out.write((candidates[0].text if format is Format.text else _json(done, line, candidates)) + "\n")
            out.flush()
            if progress:
                progress(done, None)


@app.command(epilog="Example: [bold]translator evaluate --input test.en --reference test.zh[/]")
def evaluate(
    reference: Annotated[list[Path], typer.Option("--reference", help="Reference translations; repeatable.")],
    input: InputOption = None,
    hypotheses: Annotated[Path | None, typer.Option(help="Score this file instead of translating.")] = None,
    target_language: Annotated[str | None, typer.Option(help="With --hypotheses: the language, e.g. zh.")] = None,
    checkpoint: CheckpointOption = None,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the translations here.")] = None,
    beam_size: BeamOption = None,
    set_: SetOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """BLEU and chrF, with sacreBLEU's signatures; the tokenizer follows the target language."""
    from translator.metrics import corpus_scores
    from translator.textio import read_lines

    if (input is None) == (hypotheses is None):
        raise UserError("--input: give a file to translate, or --hypotheses with finished translations")
    given = input or hypotheses
    assert given is not None
    lines = read_lines(given)
    references = [(path, read_lines(path)) for path in reference]
    for path, versions in references:
        if len(versions) != len(lines):
            raise UserError(
                f"{path} has {len(versions)} lines and {given} has {len(lines)} lines; they must correspond"
            )
    if hypotheses is None and target_language is not None:
        raise UserError("--target-language: goes with --hypotheses; a checkpoint knows its own")
    if hypotheses is not None:
        if target_language is None:
            raise UserError("--target-language: needed with --hypotheses, e.g. zh; BLEU's tokenizer depends on it")
        texts, language = lines, target_language
    else:
        translator = _translator(checkpoint, device, threads)
        texts = translator.translate(lines, _decode_config(translator, beam_size, 1, False, set_ or []))
        language = translator.config.target_language
    if output is not None:
        with output_file(output) as out:
            out.writelines(text + "\n" for text in texts)
    by_line = list(zip(*(versions for _, versions in references), strict=True))
    scores = corpus_scores(texts, by_line, language)
    typer.echo(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}")
    typer.echo(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}")


@app.command(
    epilog="Examples: [bold]translator score --input a.en --target a.zh[/]  ·  "
    "[bold]translator translate --format jsonl --input a.en | translator score --candidates -[/]"
)
def score(
    input: InputOption = None,
    target: Annotated[Path | None, typer.Option(help="Translations of --input, line by line.")] = None,
    candidates: Annotated[
        Path | None, typer.Option(help="JSON lines from translate; '-' is stdin. Scores the very tokens it found.")
    ] = None,
    checkpoint: CheckpointOption = None,
    output: OutputOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Teacher-forced log-probability of given translations: one line each, the log-probability and its tokens.

    With --candidates, one line for each candidate of each line, in order.
    """
    from translator.scoring import read_candidates, score_candidates, score_files

    if (candidates is None) == (input is None or target is None):
        raise UserError("--input and --target: give both, or --candidates alone")
    translator = _translator(checkpoint, device, threads)
    if candidates is not None:
        results = score_candidates(translator, read_candidates(candidates))
    else:
        assert input is not None and target is not None
        results = score_files(translator, input, target)
    with output_file(output) as out:
        out.writelines(f"{log_prob:.6f}\t{tokens}\n" for log_prob, tokens in results)


@app.command(
    epilog="Examples: [bold]translator train small[/]  ·  "
    "[bold]translator train mine.toml --set training.max_steps=2000 --init-from checkpoints/default[/]"
)
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe, or the name of a shipped one (small).")],
    set_: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last saved step.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint to fine-tune on the recipe's text.")] = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Train a translator on the text a recipe names. Ctrl-C saves first; --resume goes on exactly from there."""
    from train.run import run_recipe

    _set_threads(threads)
    stopped_by = run_recipe(recipe, set_ or [], resume=resume, init_from=init_from, device=device)
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


@app.command(
    epilog="Examples: [bold]translator parity[/]  ·  [bold]translator parity --self-test[/]  ·  "
    "[bold]translator parity --checkpoint checkpoints/mine/best --input dev.en[/]"
)
def parity(
    checkpoint: CheckpointOption = None,
    input: Annotated[Path | None, typer.Option(help="Sentences to check with; a few get company.")] = None,
    beam_size: Annotated[int, typer.Option("--beam-size", help="Beams of the beam search compared; 3 or more.")] = 4,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults and see whether the check catches each.")
    ] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Prove the cache: cached against uncached against PyTorch's own decoder, every logit, token and score.

    fp64 decides (1e-10), fp32 must agree to 1e-4, bf16 is reported. Exit status 1 on any fault. With --self-test, on a
    small random model, or on --checkpoint when one is given.
    """
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.device import usable_device
    from translator.diagnostics import parity as check
    from translator.diagnostics import self_test as trial
    from translator.textio import read_lines

    _set_threads(threads)
    where = usable_device(device)
    if self_test and input:
        raise UserError("--input: --self-test has sentences of its own; leave one of the two out")
    passed: bool
    if self_test:
        model = read_checkpoint(checkpoint, where).model if checkpoint else None
        with progress_bar("planting faults") as progress:
            tested = trial.self_test(model, progress=progress)
        show(trial.self_test_table(tested), [*trial.self_test_notes(tested), trial.self_test_summary(tested)])
        passed = tested.passed
    else:
        lines = read_lines(input) if input else None
        with progress_bar("comparing") as progress:
            checked = check.check_parity(
                read_checkpoint(checkpoint or DEFAULT_CHECKPOINT, where), lines, beam_size=beam_size, progress=progress
            )
        show(check.report_table(checked), [*check.report_notes(checked), check.report_summary(checked)])
        passed = checked.passed
    if not passed:
        raise typer.Exit(1)


@app.command(
    epilog="Examples: [bold]translator profile --threads 1[/]  ·  "
    "[bold]translator profile --preset xianyan --tokens 28 --plot cost.png --json cost.json[/]"
)
def profile(
    checkpoint: CheckpointOption = None,
    preset: Annotated[str | None, typer.Option(help="Random weights of a preset (xianyan, small) instead.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="dynamic, static, none (no cache), torch; repeatable. By default the first three."),
    ] = None,
    source_length: Annotated[int, typer.Option(min=1, help="Source tokens.")] = 40,
    tokens: Annotated[int, typer.Option(min=1, help="Target tokens.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sentences side by side.")] = 1,
    beams: Annotated[int, typer.Option(min=1, help="Rows a sentence.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each arm.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw milliseconds a token by position into this PNG.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Milliseconds a token, by position, with each cache and without: median and p95, first token apart."""
    from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
    from translator.config import parse
    from translator.config import preset as named_preset
    from translator.device import usable_device
    from translator.diagnostics import latency, latency_plot
    from translator.model import TranslationModel
    from translator.textio import atomic_write_bytes

    if preset and checkpoint:
        raise UserError("--preset: random weights or a --checkpoint, not both")
    wanted: dict[str, Any] = {
        "source_length": source_length,
        "tokens": tokens,
        "batch": batch,
        "beams": beams,
        "dtype": dtype,
        "repeats": repeats,
        "threads": threads,
        "device": device,
    }
    if arm:
        wanted["arms"] = tuple(arm)
    settings = parse(latency.LatencySettings, wanted, where="profile")
    usable_device(device)
    if preset:
        length = max(source_length, tokens)
        model = TranslationModel(named_preset(preset, 16_000, max_positions=max(length, 256)))
    else:
        model = read_checkpoint(checkpoint or DEFAULT_CHECKPOINT).model
    with progress_bar("timing") as progress:
        report = latency.profile_latency(model, settings, progress)
    show(latency_plot.latency_table(report), [])
    if plot:
        latency_plot.plot(report, plot)
    if json_:
        atomic_write_bytes(json_, (json.dumps(report.to_json(), indent=2) + "\n").encode())


# -- shared by the commands ------------------------------------------------------------------------------------------


def _translator(checkpoint: Path | None, device: str, threads: int | None) -> "Translator":
    from translator.pipeline import Translator

    _set_threads(threads)
    return Translator.from_checkpoint(checkpoint, device=device)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _decode_config(
    translator: "Translator", beam_size: int | None, n_best: int, sample: bool, settings: list[str]
) -> "DecodeConfig":
    from translator.config import apply_setting

    values: dict[str, Any] = {"n_best": n_best}
    if beam_size is not None:
        values["beam_size"] = beam_size
    if sample:
        values["sampling"] = True
    for setting in settings:
        apply_setting(values, setting)
    return translator.decode_config(None, **values)


def _json(number: int, source: str, candidates: "list[Candidate]") -> str:
    return json.dumps(
        {
            "line": number,
            "source": source,
            "sentences": candidates[0].sources,
            "translations": [
                {"text": c.text, "log_prob": c.log_prob, "score": c.score, "tokens": c.tokens} for c in candidates
            ],
        },
        ensure_ascii=False,
    )


def main() -> NoReturn:
    """Runs the program; a `UserError` or a wrong option is one line on stderr and status 2."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("translator: %(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logging.getLogger("translator").handlers = [handler]
    try:
        status = app(standalone_mode=False, prog_name="translator")
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is left to tell them.
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        # A wrong option or command. Typer carries its own copy of click, so the class has no stable name to catch.
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            _fail(message)
        sys.exit(2)  # no command: the help is on the screen already
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    print("translator: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
