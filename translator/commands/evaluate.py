"""`translator evaluate`: how good translations are, by BLEU and chrF."""

from pathlib import Path
from typing import Annotated

import typer

from translator.commands.options import (
    BeamOption,
    CheckpointOption,
    DeviceOption,
    InputOption,
    SetOption,
    ThreadsOption,
    decode_config,
    load_translator,
)
from translator.console import output_file
from translator.errors import UserError

EXAMPLES = ("translator evaluate --input test.en --reference test.zh",)


def run(
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
        translator = load_translator(checkpoint, device, threads)
        texts = translator.translate(lines, decode_config(translator, beam_size, 1, False, set_ or []))
        language = translator.config.target_language
    if output is not None:
        with output_file(output) as out:
            out.writelines(text + "\n" for text in texts)
    by_line = list(zip(*(versions for _, versions in references), strict=True))
    scores = corpus_scores(texts, by_line, language)
    typer.echo(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}")
    typer.echo(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}")
