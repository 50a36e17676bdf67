"""Options that several commands share, and what they stand for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from translator.bounds import MOST_BATCH_TOKENS, MOST_ROWS, MOST_THREADS

if TYPE_CHECKING:
    from translator.config import DecodeConfig
    from translator.pipeline import Translator

CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Folder of a model, or of a run, for its best; by default the shipped model."),
]
CheckpointsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        help="Folder of a model, or of a run, for its best; by default the shipped model. Several decode together: "
        "their log-probabilities are averaged.",
    ),
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="CODE", help="Language of the source, for a shipped model; default en.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="CODE", help="Language of the translation; by default zh, from zh en.")
]
InputOption = Annotated[
    Path | None, typer.Option("--input", help="UTF-8 text, a sentence or paragraph a line; - is standard input.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="File to write, whole or not at all; - is standard output.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads in all; by default PyTorch's.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=MOST_THREADS, help="Batches at once, which share the threads; by default one a thread."
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
BeamOption = Annotated[
    int | None,
    typer.Option("--beam-size", min=1, max=MOST_ROWS, help="Beams; 1 is greedy. By default the checkpoint's setting."),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens",
        min=1,
        max=MOST_BATCH_TOKENS,
        help="Tokens side by side, beams and padding counted; more is faster and takes memory.",
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache", metavar="KIND[,OPTION=N…]", help="Kind of cache; a wrong one is answered with those known."
    ),
]
EngineOption = Annotated[
    str,
    typer.Option("--engine", metavar="NAME", help="eager: plain PyTorch; packed: for CPUs; graphs: for GPUs; auto."),
]
ComputeTypeOption = Annotated[
    str,
    typer.Option(
        "--compute-type",
        metavar="TYPE",
        help="What weights are computed with: float32, float16, bfloat16, int8; auto changes none.",
    ),
]
ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Promise results that are the same to the bit whatever the batch, its order, the cache and the threads. "
        "Engine packed always gives them; this refuses any other, and first tries the kernels on this machine.",
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one setting.")]


def load_translator(
    checkpoints: list[Path] | None,
    device: str,
    threads: int | None,
    batch_tokens: int | None = None,
    cache: str | None = None,
    workers: int | None = None,
    engine: str = "auto",
    compute_type: str = "auto",
    exact: bool = False,
    languages: tuple[str | None, str | None] = (None, None),
) -> "Translator":
    """The checkpoints in these folders, or the shipped one for `languages`, ready to translate; raises `UserError`."""
    from translator.checkpoint import checkpoint_folder
    from translator.pipeline import Translator
    from translator.shipped import check_languages, shipped_checkpoint

    if checkpoints and any(languages):
        for folder in checkpoints:
            check_languages(checkpoint_folder(folder), *languages)
    checkpoints = checkpoints or [shipped_checkpoint(*languages)]
    set_threads(threads)
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "cache": cache, "workers": workers}
    given = {name: value for name, value in options.items() if value is not None}
    return Translator.from_checkpoint(
        *checkpoints, device=device, engine=engine, compute_type=compute_type, exact=exact, **given
    )


def set_threads(threads: int | None) -> None:
    """Sets PyTorch's CPU threads; None leaves them."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def decode_config(
    translator: "Translator", beam_size: int | None, n_best: int, sample: bool, settings: list[str]
) -> "DecodeConfig":
    """The checkpoint's search settings with those of the command line; raises `UserError` for impossible ones."""
    from translator.config import apply_setting

    values: dict[str, Any] = {"n_best": n_best}
    if beam_size is not None:
        values["beam_size"] = beam_size
    if sample:
        values["sampling"] = True
    for setting in settings:
        apply_setting(values, setting)
    return translator.decode_config(None, **values)
