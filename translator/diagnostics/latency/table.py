"""A latency report as a table."""

from statistics import median

from rich.table import Table

from translator.diagnostics.latency.arms import UNCACHED
from translator.diagnostics.latency.report import LatencyReport


def latency_table(report: LatencyReport) -> Table:
    """One row an arm; ratios are of cumulative time, start included, to the arm without a cache."""
    last = report.settings.tokens
    marks = [t for t in (1, 2, 4, 28) if t < last] + [last]
    table = Table(title=describe(report), title_justify="left", box=None, pad_edge=False)
    table.add_column("arm")
    for name in ("start ms", "first token ms", "later tokens ms", "p95 ms", "last ÷ first tenth", "all ms"):
        table.add_column(name, justify="right")
    for mark in marks:
        table.add_column(f"ratio at {mark}", justify="right")
    table.add_column("ahead from", justify="right")
    table.add_column("cache MB", justify="right")
    for name, arm in report.arms.items():
        later, slow = arm.median_ms[1:] or arm.median_ms, arm.p95_ms[1:] or arm.p95_ms
        times = [arm.start_ms, arm.first_token_ms, median(later), median(slow)]
        table.add_row(
            name,
            *(f"{value:.2f}" for value in times),
            f"{arm.tail_ratio:.2f}",
            f"{arm.cumulative_ms[-1]:.1f}",
            *(f"{arm.ratio[mark - 1]:.3f}" if arm.ratio else "" for mark in marks),
            "" if name == UNCACHED or not arm.ratio else str(arm.ahead_from or "never"),
            f"{arm.cache_bytes / 1e6:.2f}" if arm.cache_bytes else "",
        )
    return table


def describe(report: LatencyReport) -> str:
    """Sizes, threads, precision and processor in two lines."""
    sizes, settings, machine = report.sizes, report.settings, report.machine
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'s'[: machine['threads'] > 1]}"
    return (
        f"width {sizes['d_model']}, {sizes['nhead']} heads, {sizes['num_decoder_layers']} decoder layers, "
        f"feed-forward {sizes['dim_feedforward']}, vocabulary {sizes['vocab_size']}; "
        f"batch {settings.batch}, beams {settings.beams}, source {settings.source_length} tokens\n"
        f"{where}, {settings.dtype}, torch {machine['torch']}, {settings.repeats} repeats; encoder not included"
    )
