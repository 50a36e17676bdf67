"""A latency report as a table for the terminal and as a picture: the rising line and the flat one."""

from io import BytesIO
from itertools import cycle
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from translator.cache import CACHE_KINDS
from translator.console import write_bytes
from translator.diagnostics.latency_arms import TORCH, UNCACHED
from translator.diagnostics.latency_report import ArmLatency, LatencyReport
from translator.errors import UserError

LABELS = {UNCACHED: "no cache: whole prefix each step", TORCH: "nn.TransformerDecoder, whole prefix"}
FORMATS = ("png", "pdf", "svg")
# Colours that stay apart for colour-blind readers (Okabe and Ito); every kind of cache has one of its own.
_CACHE_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#000000")
COLOURS = {UNCACHED: "#D55E00", TORCH: "#CC79A7", **dict(zip(sorted(CACHE_KINDS), cycle(_CACHE_COLOURS), strict=False))}


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


def picture_format(path: Path) -> str:
    """The format that the name of `path` asks for, PNG for `-`; raises `UserError` for one that isn't drawn."""
    suffix = "png" if str(path) == "-" else path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(f"{path}: a picture's name ends in one of {', '.join(f'.{name}' for name in FORMATS)}")
    return suffix


def plot(report: LatencyReport, path: Path) -> None:
    """Draws milliseconds a token by position with the band up to p95, and the cumulative time beside it.

    In the format that the name asks for, PNG on standard output for `-`. Raises `UserError` when the file can't be
    written.
    """
    format = picture_format(path)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    by_token, cumulative = figure.subplots(1, 2)
    figure.suptitle(describe(report), fontsize=10)
    for name, arm in report.arms.items():
        draw_tokens(by_token, name, arm)
        positions = range(1, len(arm.cumulative_ms) + 1)
        cumulative.plot(positions, arm.cumulative_ms, color=COLOURS[name], label=_label(name))
    label_axes(by_token, "milliseconds for this token", "One token (line: median, band: to p95)")
    label_axes(cumulative, "milliseconds since the encoder finished", "All tokens so far, start included")
    image = BytesIO()
    figure.savefig(image, format=format)
    write_bytes(path, image.getvalue())


def draw_tokens(axes: Axes, name: str, arm: ArmLatency) -> None:
    """One arm's median by position and the band from it up to p95."""
    positions = range(1, len(arm.median_ms) + 1)
    axes.plot(positions, arm.median_ms, color=COLOURS[name], label=_label(name))
    axes.fill_between(positions, arm.median_ms, arm.p95_ms, color=COLOURS[name], alpha=0.2, linewidth=0)


def label_axes(axes: Axes, y: str, title: str) -> None:
    """Axes from zero, so that heights compare."""
    axes.set(xlabel="position of the token in the target", ylabel=y, title=title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)


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


def _label(name: str) -> str:
    return LABELS.get(name, f"{name} cache")
