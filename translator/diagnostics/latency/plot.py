"""A latency report as a picture: the rising line and the flat one."""

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from translator.cache import CACHE_KINDS
from translator.console import write_bytes
from translator.diagnostics.latency.arms import TORCH, UNCACHED
from translator.diagnostics.latency.report import ArmLatency, LatencyReport, describe
from translator.errors import UserError

LABELS = {UNCACHED: "no cache: whole prefix each step", TORCH: "nn.TransformerDecoder, whole prefix"}
FORMATS = ("png", "pdf", "svg")
# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = {UNCACHED: "#D55E00", TORCH: "#CC79A7"}
_CACHE_COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#000000")


def colour(name: str) -> str:
    """An arm's colour; every kind of cache has one of its own, as far as there are enough."""
    if name in COLOURS:
        return COLOURS[name]
    return _CACHE_COLOURS[sorted(CACHE_KINDS).index(name) % len(_CACHE_COLOURS)]


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
        cumulative.plot(positions, arm.cumulative_ms, color=colour(name), label=_label(name))
    label_axes(by_token, "milliseconds for this token", "One token (line: median, band: to p95)")
    label_axes(cumulative, "milliseconds since the encoder finished", "All tokens so far, start included")
    image = BytesIO()
    figure.savefig(image, format=format)
    write_bytes(path, image.getvalue())


def draw_tokens(axes: Axes, name: str, arm: ArmLatency) -> None:
    """One arm's median by position and the band from it up to p95."""
    positions = range(1, len(arm.median_ms) + 1)
    axes.plot(positions, arm.median_ms, color=colour(name), label=_label(name))
    axes.fill_between(positions, arm.median_ms, arm.p95_ms, color=colour(name), alpha=0.2, linewidth=0)


def label_axes(axes: Axes, y: str, title: str) -> None:
    """Axes from zero, so that heights compare."""
    axes.set(xlabel="position of the token in the target", ylabel=y, title=title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)


def _label(name: str) -> str:
    return LABELS.get(name, f"{name} cache")
