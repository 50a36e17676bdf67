"""Accounts as tables and as plain values."""

from fractions import Fraction
from typing import Any

import torch
from rich.table import Table

from translator.attention import KERNELS
from translator.diagnostics.memory.figures import NOT_APPLICABLE, fitting, last_within, short, sizes
from translator.diagnostics.memory.layers import scores_matrix
from translator.diagnostics.memory.own import OwnAccount, StackAccount
from translator.diagnostics.memory.presets import Preset, Rule, kinds


def preset_values(name: str, preset: Preset, lengths: list[int], budget: int | None, weights: int | None) -> Any:
    """Everything that is said of a preset, as plain values; None is what isn't applicable."""
    weights = preset.weights if weights is None else weights
    rules = [*preset.rules, *([preset.without] if preset.without else [])]
    return {
        "preset": name,
        "layers": preset.layers,
        "bytes_a_number": preset.itemsize,
        "weights": weights,
        "scores_matrix_a_layer": {length: scores_matrix(preset.query_heads, length) for length in lengths},
        "rules": [_rule_values(rule, preset, lengths, budget, weights) for rule in rules],
        "notes": list(preset.notes),
    }


def _rule_values(rule: Rule, preset: Preset, lengths: list[int], budget: int | None, weights: int | None) -> Any:
    size = preset.itemsize
    outweighs = None if weights is None else last_within(lambda length: rule.nbytes(length, size), weights)
    growth = rule.growth(size)
    return {
        "says": rule.says,
        "kinds": kinds(rule.layers),
        "bytes_a_token": _number(growth) if growth else None,
        "layers": [
            {"count": n, "kind": kept.kind, "rule": kept.rule, "bytes_a_token": _number(n * kept.growth * size)}
            for n, kept in rule.layers
        ],
        "bytes": {length: rule.nbytes(length, size) for length in lengths},
        "fit": {length: None if budget is None else fitting(budget, rule.nbytes(length, size)) for length in lengths},
        "outweighs_weights_after": outweighs,
    }


def preset_tables(values: Any, budget: int | None) -> tuple[list[Table], list[str]]:
    """A table of totals, one of the layers, and notes."""
    title = f"{values['preset']}: {values['layers']} layers, {values['bytes_a_number']} bytes a number, one sequence"
    totals = _table(title, "counted", ("bytes a token", "tokens", "bytes", "GB", "GiB"))
    if budget is not None:
        totals.add_column(f"fit in {budget:,} bytes", justify="right")
    totals.add_column("outweighs weights after", justify="right")
    for rule in values["rules"]:
        for length, count in rule["bytes"].items():
            cells = [said(rule["bytes_a_token"]), f"{length:,}", *sizes(count)]
            if budget is not None:
                cells.append(said(rule["fit"][length]))
            totals.add_row(rule["says"] or rule["kinds"], *cells, said(rule["outweighs_weights_after"]))
    layers = _table("What a layer keeps, in numbers", "layers", ("bytes a token, all of them",))
    layers.add_column("rule")
    for layer in values["rules"][0]["layers"]:
        layers.add_row(f"{layer['count']} × {layer['kind']}", said(layer["bytes_a_token"] or None), layer["rule"])
    return [totals, layers], [*_preset_notes(values), *(f"note: {note}" for note in values["notes"])]


def _preset_notes(values: Any) -> list[str]:
    notes = [
        f"eager attention over {length:,} tokens: {count:,} bytes ({short(count / 1000**3)} GB) of weights a layer"
        for length, count in values["scores_matrix_a_layer"].items()
    ]
    if values["weights"] is None:
        notes.append("weights: not known here; --weights 13.4GB asks from which length on the cache outweighs them")
    else:
        notes.append(f"weights: {values['weights']:,} bytes, which every step reads once for all sequences")
    return notes


def own_values(account: OwnAccount, length: int, budget: int | None, weights: int | None) -> Any:
    """Everything that is said of a model of this project, as plain values."""
    weights = account.weights if weights is None else weights
    return {
        "structure": account.structure,
        "length": length,
        "weights": weights,
        "containers": {stack.kind: _stack_values(stack, length, budget, weights) for stack in account.stacks},
    }


def _stack_values(stack: StackAccount, length: int, budget: int | None, weights: int) -> Any:
    if stack.refused:
        return {"refused": stack.refused}
    held = stack.nbytes(length)
    return {
        "bytes_a_token": _number(Fraction(stack.kept(length), length)),
        "read": stack.read(length),
        "source": stack.source_bytes,
        "bytes": held,
        "fit": None if budget is None else fitting(budget, held),
        "outweighs_weights_after": stack.outweighs(weights),
    }


def own_table(values: list[Any], budget: int | None, beams: int, source_length: int) -> tuple[Table, list[str]]:
    """One row for each structure and container, and notes for those that refuse each other."""
    length = values[0]["length"]
    title = (
        f"one sentence of {length:,} target and {source_length:,} source tokens, {beams} beam{'s'[: beams > 1]}; "
        f"a step reads {values[0]['weights']:,} bytes of weights"
    )
    table = _table(title, "structure", ())
    table.add_column("container")
    for heading in ("bytes a token", "source", "bytes held", "GB", "GiB"):
        table.add_column(heading, justify="right")
    if budget is not None:
        table.add_column(f"fit in {budget:,} bytes", justify="right")
    table.add_column("outweighs weights after", justify="right")
    notes = []
    for one in values:
        for kind, stack in one["containers"].items():
            if "refused" in stack:
                notes.append(f"{one['structure']} in {kind}: {stack['refused']}")
                continue
            cells = [said(stack["bytes_a_token"]), f"{stack['source']:,}", *sizes(stack["bytes"])]
            if budget is not None:
                cells.append(said(stack["fit"]))
            table.add_row(one["structure"], kind, *cells, said(stack["outweighs_weights_after"]))
    return table, notes


def kernel_values(device: torch.device) -> list[dict[str, Any]]:
    """What each attention kernel needs and gives, and whether it runs on `device` here."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    stores = {(True, True): "yes", (False, False): "no", (True, False): "on CPUs", (False, True): "on GPUs"}
    return [
        {
            "kernel": name,
            "mask": kernel.mask,
            "stores_scores": stores[kernel.stores_scores(cpu), kernel.stores_scores(gpu)],
            "returns_weights": kernel.returns_weights,
            "layouts": list(kernel.layouts),
            "missing": kernel.missing(device),
        }
        for name, kernel in sorted(KERNELS.items())
    ]


def kernel_table(values: list[dict[str, Any]], device: torch.device) -> tuple[Table, list[str]]:
    """One row a kernel; notes say why one doesn't run."""
    table = Table(title="Attention kernels", title_justify="left", box=None, pad_edge=False)
    for heading in ("kernel", "mask", "stores S × S", "returns weights", "reads K and V", f"runs on {device}"):
        table.add_column(heading)
    for one in values:
        weights, runs = ("yes" if found else "no" for found in (one["returns_weights"], not one["missing"]))
        layouts = " or ".join(one["layouts"])
        table.add_row(one["kernel"], one["mask"], one["stores_scores"], weights, layouts, runs)
    return table, [f"{one['kernel']}: {one['missing']}" for one in values if one["missing"]]


def said(value: float | None) -> str:
    """A figure, or that there is none."""
    if value is None:
        return NOT_APPLICABLE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _table(title: str, first: str, figures: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(first)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table
