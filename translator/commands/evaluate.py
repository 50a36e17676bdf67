"""`translator evaluate`: how good translations are, by BLEU and chrF."""

from pathlib import Path
from typing import Annotated

import typer

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
    SetOption,
    ThreadsOption,
    ToOption,
    decode_config,
    load_translator,
)
from translator.console import (
    check_outputs,
    input_lines,
    is_standard_stream,
    one_standard_input,
    output_file,
    progress_bar,
    stream_name,
)
from translator.errors import UserError

EXAMPLES = (
    "translator evaluate --input test.en --reference test.zh",
    "translator evaluate --check-leakage small",
    "translator evaluate --hypotheses out.zh --reference test.zh --target-language zh",
)


def run(
    reference: Annotated[
        list[Path] | None, typer.Option("--reference", help="Reference translations; repeatable.")
    ] = None,
    input: InputOption = None,
    hypotheses: Annotated[Path | None, typer.Option(help="Score this file instead of translating.")] = None,
    target_language: Annotated[str | None, typer.Option(help="With --hypotheses: the language, e.g. zh.")] = None,
    checkpoint: CheckpointsOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    check_leakage: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Only prove that no test sentence is in this recipe's training text: those of the files given, "
            "or else of the recipe's own test part.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="With --check-leakage: where the recipe's files are.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Also write the translations here; - is standard output.")
    ] = None,
    beam_size: BeamOption = None,
    set_: SetOption = None,
    cache: CacheOption = None,
    batch_tokens: BatchOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    engine: EngineOption = "auto",
    compute_type: ComputeTypeOption = "auto",
    exact: ExactOption = False,
) -> None:
    """BLEU and chrF, with sacreBLEU's signatures; the tokenizer follows the target language.

    - is standard input for --input, --hypotheses or --reference. With --output -, the scores go to standard error.
    """
    from translator.metrics import METRICS, corpus_scores

    if check_leakage is not None:
        _prove_no_leakage(check_leakage, set_ or [], data, [*([input] if input else []), *(reference or [])])
        return
    if data is not None:
        raise UserError("--data: goes with --check-leakage")
    if not reference:
        raise UserError("--reference: name at least one file of reference translations")
    if (input is None) == (hypotheses is None):
        raise UserError("--input: give a file to translate, or --hypotheses with finished translations")
    given = input or hypotheses
    assert given is not None
    searching = {"beam-size": beam_size, "set": set_, "cache": cache, "batch-tokens": batch_tokens}
    if exact and hypotheses is not None:
        raise UserError("--exact: goes with --input; with --hypotheses nothing is translated")
    _check_language(hypotheses, target_language, [name for name, value in searching.items() if value is not None])
    one_standard_input(**{"input or --hypotheses": given}, **{f"reference {n}": p for n, p in enumerate(reference, 1)})
    check_outputs(output=output)
    lines = input_lines(given)
    references = [_references(path, given, len(lines)) for path in reference]
    if hypotheses is not None:
        assert target_language is not None
        texts, language = lines, target_language
    else:
        translator = load_translator(
            checkpoint,
            device,
            threads,
            batch_tokens,
            cache,
            engine=engine,
            compute_type=compute_type,
            exact=exact,
            languages=(from_, to),
        )
        config = decode_config(translator, beam_size, 1, False, set_ or [])
        with progress_bar("translating, lines") as advance:
            texts = translator.translate(lines, config, progress=advance)
        language = translator.config.target_language
    if output is not None:
        with output_file(output) as out:
            out.writelines(text + "\n" for text in texts)
    scores = corpus_scores(texts, list(zip(*references, strict=True)), language)
    aside = is_standard_stream(output)
    for name, score in scores.items():
        typer.echo(f"{METRICS[name].label} {score.value:.2f}  {score.signature}", err=aside)


def _prove_no_leakage(recipe: str, settings: list[str], data: Path | None, files: list[Path]) -> None:
    """Says what `train.leakage` finds; exit code 1 where a test sentence is in training."""
    from train.leakage import leakage

    found = leakage(recipe, settings, data, [line for path in files for line in input_lines(path)] if files else None)
    for line in found.lines():
        typer.echo(line)
    if found.found:
        raise typer.Exit(1)


def _check_language(hypotheses: Path | None, target_language: str | None, searching: list[str]) -> None:
    """Raises `UserError` for options that don't go together; `searching` are those given that only a search needs."""
    if hypotheses is None and target_language is not None:
        raise UserError("--target-language: goes with --hypotheses; a checkpoint knows its own")
    if hypotheses is None:
        return
    if target_language is None:
        raise UserError("--target-language: needed with --hypotheses, e.g. zh; BLEU's tokenizer depends on it")
    if searching:
        raise UserError(f"--{searching[0]}: goes with --input; with --hypotheses nothing is translated")


def _references(path: Path, given: Path, count: int) -> list[str]:
    versions = input_lines(path)
    if len(versions) != count:
        raise UserError(
            f"{stream_name(path)} has {len(versions)} lines and {stream_name(given)} has {count} lines; they must "
            "correspond"
        )
    return versions
