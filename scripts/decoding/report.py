"""Tables of the figures, and the one line that ends a run."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from decoding.sections import RIVALS
from translator.console import show

Figures = dict[str, Any]


def show_section(section: str, figures: Figures, threads: int) -> None:
    """One table a workload on standard output."""
    title = f"{section}, {threads} thread{'s' * (threads > 1)}"
    if section == "one" or section == "file":
        for case, systems in figures.items():
            if isinstance(systems, dict):
                show(timings(f"{title}: {case}", systems, in_bulk=section == "file"), [])
    elif section == "plain":
        show(timings(title, figures, in_bulk=False, against=("uncached",)), [])
    elif section == "positions":
        show(positions(title, figures), [])
    elif section == "memory":
        show(memory(title, figures), [])
    else:
        show(starts(title, figures), [])


def timings(title: str, systems: Figures, *, in_bulk: bool, against: tuple[str, ...] = RIVALS) -> Table:
    """Times, rates, ratios."""
    table = _table(title, "system")
    rivals = [rival for rival in against if rival in systems]
    units = ("tokens / s", "tokens / CPU s") if in_bulk else ("ms", "least", "CPU ms")
    for heading in (*units, *(f"of {rival}, wall / CPU" for rival in rivals), "agrees"):
        table.add_column(heading, justify="right")
    if in_bulk:
        table.add_column("layout")
    for name, found in systems.items():
        if in_bulk:
            cells = [f"{found[f'tokens_a_{clock}_second']:,.0f}" for clock in ("wall", "cpu")]
        else:
            cells = [f"{found[key]:.2f}" for key in ("wall_ms", "wall_ms_least", "cpu_ms")]
        for rival in rivals:
            ratio = found.get(f"of {rival}")
            both = ("wall", "cpu")
            cells.append(" / ".join(f"{ratio[clock]:.2f}" for clock in both) if ratio else "")
        agrees = found.get("agrees")
        cells.append("" if agrees is None else f"{agrees:.1%}")
        if in_bulk:
            cells.append(", ".join(f"{key} {value}" for key, value in found["layout"].items()))
        table.add_row(name, *cells)
    return table


def positions(title: str, figures: Figures) -> Table:
    """Early and late tokens."""
    rate = figures["read_bytes_a_second"] or 0
    table = _table(f"{title}; reads {rate / 1e9:.1f} GB/s", "system")
    for heading in (f"ms at {figures['near']}", f"at {figures['far']}", "added", "reading K and V", "ratio"):
        table.add_column(heading, justify="right")
    for name, found in figures.items():
        if isinstance(found, dict):
            keys = ("near_ms", "far_ms", "added_ms", "reading_ms", "ratio")
            table.add_row(name, *(f"{found[key]:.2f}" for key in keys))
    return table


def memory(title: str, figures: Figures) -> Table:
    """Peaks."""
    table = _table(title, "system")
    cases = list(dict.fromkeys(case for found in figures.values() for case in found))
    for case in cases:
        table.add_column(f"{case}, MB", justify="right")
    for name, found in figures.items():
        table.add_row(name, *(f"{found[case]:.0f}" if case in found else "" for case in cases))
    return table


def starts(title: str, figures: Figures) -> Table:
    """Starts."""
    table = _table(title, "process")
    for heading in ("seconds", "least"):
        table.add_column(heading, justify="right")
    for name, found in figures.items():
        cells = (found["median"], found["least"]) if isinstance(found, dict) else (found,)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), *[""] * (2 - len(cells)))
    return table


def told(figures: Figures) -> Figures:
    """What the one line holds: medians, wall."""
    line: Figures = {}
    for section, found in figures.items():
        if section in ("one", "file"):
            line[section] = {case: _medians(systems) for case, systems in found.items() if isinstance(systems, dict)}
        elif section == "plain":
            line[section] = _medians(found)
        else:
            line[section] = found
    return line


def _medians(systems: Figures) -> Figures:
    return {name: round(found["wall_ms"], 4) for name, found in systems.items()}


def _table(title: str, first: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    return table
