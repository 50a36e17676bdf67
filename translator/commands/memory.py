"""`translator memory`: what a cache takes, before there is one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from translator.bounds import MOST_POSITIONS, MOST_ROWS
from translator.commands.options import CheckpointOption, DeviceOption
from translator.console import check_outputs, is_standard_stream, show, write_bytes
from translator.errors import UserError

if TYPE_CHECKING:
    from translator.diagnostics.memory import OwnAccount

EXAMPLES = (
    "translator memory --budget 1GiB",
    "translator memory --preset llama2-7b --budget 10GiB",
    "translator memory --kernels",
    "translator memory --attention latent --attention multihead --plot memory.png",
)

MOST_TOKENS = 1 << 30


def run(
    checkpoint: CheckpointOption = None,
    preset: Annotated[
        str | None, typer.Option(help="A known model instead; a wrong name is answered with all.")
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A structure of this size instead of the checkpoint's own; repeatable."),
    ] = None,
    cache: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="A kind of cache; repeatable; by default all.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens held; by default the full context.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="How many sentences fit in so much, as 10GiB or 10GB.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of the weights, as 13.4GB, where others are meant.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Rows a sentence.")] = 1,
    source_length: Annotated[int, typer.Option(min=1, max=MOST_POSITIONS, help="Source tokens.")] = 40,
    dtype: Annotated[
        str, typer.Option(help="float32, float16, bfloat16 or float64: of weights and cache.")
    ] = "float32",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead, what each attention kernel needs, stores and gives.")
    ] = False,
    device: DeviceOption = "cpu",
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes by length into this .png, .pdf or .svg; - is standard output.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every figure here; - is standard output.")] = None,
) -> None:
    """Bytes of a KV cache by structure and container, worked out before anything is allocated.

    Bytes a token, bytes at a length, sentences that fit in a memory, and the length after which a step reads more of
    the cache than of the weights. When --plot or --json go to standard output, the table goes to standard error.
    """
    from translator.diagnostics.latency.plot import picture_format
    from translator.diagnostics.memory import parse_bytes
    from translator.textio import json_text

    if preset and (checkpoint or attention or cache):
        raise UserError("--preset: a known model, or a --checkpoint with --attention and --cache, not both")
    if kernels and (preset or checkpoint or attention or cache or plot):
        raise UserError("--kernels: they are the same for every model, and there is nothing to draw")
    check_outputs(plot=plot, json=json_)
    if plot:
        picture_format(plot)
    limit = None if budget is None else parse_bytes(budget, "--budget")
    heavy = None if weights is None else parse_bytes(weights, "--weights")
    aside = is_standard_stream(plot) or is_standard_stream(json_)
    if kernels:
        values = _kernels(device, aside)
    elif preset:
        values = _preset(preset, length, limit, heavy, plot, aside)
    else:
        accounts, longest = _accounts(checkpoint, attention, cache, length, beams, source_length, dtype)
        values = _own(accounts, longest, limit, heavy, plot, (aside, beams, source_length))
    if json_:
        write_bytes(json_, (json_text(values, indent=2) + "\n").encode())


def _preset(
    name: str, length: int | None, budget: int | None, weights: int | None, plot: Path | None, aside: bool
) -> Any:
    from translator.diagnostics.memory import memory_preset
    from translator.diagnostics.memory import plot as picture
    from translator.diagnostics.memory.report import preset_tables, preset_values

    preset = memory_preset(name)
    lengths = [length] if length else list(preset.lengths)
    values = preset_values(name, preset, lengths, budget, weights)
    (totals, layers), notes = preset_tables(values, budget)
    show(totals, [], aside=aside)
    show(layers, notes, aside=aside)
    if plot:
        rules = [*preset.rules, *([preset.without] if preset.without else [])]
        curves = {rule.says or name: lambda tokens, rule=rule: rule.nbytes(tokens, preset.itemsize) for rule in rules}
        picture.plot(curves, _marks(budget, values["weights"]), lengths[-1], plot)
    return values


def _kernels(device: str, aside: bool) -> Any:
    from translator.device import usable_device
    from translator.diagnostics.memory.report import kernel_table, kernel_values

    values = kernel_values(place := usable_device(device))
    table, notes = kernel_table(values, place)
    show(table, notes, aside=aside)
    return values


def _accounts(
    checkpoint: Path | None,
    attention: list[str] | None,
    cache: list[str] | None,
    length: int | None,
    beams: int,
    source_length: int,
    dtype: str,
) -> tuple[list["OwnAccount"], int]:
    """The checkpoint's sizes with each structure asked for, and the length meant; no weight is read."""
    from dataclasses import replace

    import torch

    from translator.cache import CACHE_KINDS, CacheSpec
    from translator.checkpoint import DEFAULT_CHECKPOINT, CheckpointConfig, checkpoint_folder, read_around
    from translator.diagnostics.memory.own import account_of, unallocated

    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if dtype not in types:
        raise UserError(f"--dtype {dtype!r}: one of {', '.join(types)}")
    kinds = cache or sorted(CACHE_KINDS)
    for kind in kinds:
        if kind not in CACHE_KINDS:
            raise UserError(f"--cache {kind!r}: unknown kind; known: {', '.join(sorted(CACHE_KINDS))}")
    config, _ = read_around(checkpoint_folder(checkpoint or DEFAULT_CHECKPOINT), CheckpointConfig)
    longest = length or config.model.max_positions
    spec = CacheSpec(beams=beams)
    sizes = [replace(config.model, attention=name, decoder_layers=()) for name in attention or ()] or [config.model]
    accounts = [
        account_of(unallocated(each, types[dtype]), spec, kinds, longest, source_length=source_length) for each in sizes
    ]
    return accounts, longest


def _own(
    accounts: list["OwnAccount"],
    length: int,
    budget: int | None,
    weights: int | None,
    plot: Path | None,
    shown: tuple[bool, int, int],
) -> Any:
    from translator.diagnostics.memory import plot as picture
    from translator.diagnostics.memory.report import own_table, own_values

    aside, beams, source_length = shown
    values = [own_values(account, length, budget, weights) for account in accounts]
    table, notes = own_table(values, budget, beams, source_length)
    show(table, notes, aside=aside)
    if plot:
        curves = {
            f"{account.structure}, {stack.kind}": stack.nbytes
            for account in accounts
            for stack in account.stacks
            if not stack.refused
        }
        picture.plot(curves, _marks(budget, values[0]["weights"]), length, plot)
    return values


def _marks(budget: int | None, weights: int | None) -> dict[str, int]:
    found = {"budget": budget, "weights": weights}
    return {name: level for name, level in found.items() if level is not None}
