"""A run's log as curves: loss, scores, learning rate and speed over its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.report import LOG, read_log
from translator.errors import UserError
from translator.metrics import METRICS

# Colours that stay apart for colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Run:
    """A run's name and its log's records, in order of their steps."""

    name: str
    records: list[dict[str, Any]]

    def points(self, event: str, value: Callable[[dict[str, Any]], Any]) -> tuple[list[int], list[float]]:
        """Steps and values of one kind of record, where it has the value."""
        found = [(record["step"], value(record)) for record in self.records if record["event"] == event]
        kept = [(step, float(number)) for step, number in found if isinstance(number, (int, float))]
        return [step for step, _ in kept], [number for _, number in kept]


def read_run(folder: Path) -> Run:
    """The log in a run's folder; raises `UserError` where there is none, or no step in it."""
    path = folder / LOG
    if not path.is_file():
        raise UserError(f"{folder}: not the folder of a training run, there is no {LOG} in it")
    records = read_log(path)
    if not any(record["event"] == "step" for record in records):
        raise UserError(f"{path}: no step is logged yet; one is every training.log_every steps")
    return Run(folder.resolve().name, sorted(records, key=lambda record: record["step"]))


def picture(runs: Sequence[Run], format: str) -> bytes:
    """Four panels over the steps, one colour a run: loss, scores of the dev part, learning rate, speed."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, scores, rate, speed = figure.subplots(2, 2).flat
    for index, run in enumerate(runs):
        colour, prefix = _COLOURS[index % len(_COLOURS)], f"{run.name}: " if len(runs) > 1 else ""
        _line(loss, run.points("step", lambda record: record.get("loss")), colour, f"{prefix}training, smoothed")
        dev = run.points("validation", lambda record: record.get("dev_loss"))
        _line(loss, dev, colour, f"{prefix}dev", style="--", marker="o")
        for style, (name, metric) in zip(_STYLES, METRICS.items(), strict=False):
            value = run.points("validation", lambda record, key=f"dev_{name}": record.get(key))  # type: ignore[misc]
            _line(scores, value, colour, f"{prefix}{metric.label}", style=style, marker="o")
        _line(rate, run.points("step", lambda record: record.get("learning_rate")), colour, run.name)
        _line(speed, run.points("step", lambda record: record.get("tokens_per_second")), colour, run.name)
    _label(loss, "nats a target token", "Loss")
    _label(scores, "points", "Dev part, greedy")
    _label(rate, "learning rate", "Learning rate", legend=len(runs) > 1)
    _label(speed, "target tokens a second", "Speed", legend=len(runs) > 1)
    speed.set_ylim(bottom=0)
    image = BytesIO()
    figure.savefig(image, format=format, dpi=90)
    return image.getvalue()


def _line(
    axes: Axes,
    points: tuple[list[int], list[float]],
    colour: str,
    label: str,
    style: str = "-",
    marker: str | None = None,
) -> None:
    if points[0]:
        axes.plot(*points, color=colour, label=label, linestyle=style, marker=marker, markersize=3)


def _label(axes: Axes, y: str, title: str, legend: bool = True) -> None:
    axes.set(xlabel="step", ylabel=y, title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if legend and axes.has_data():
        axes.legend(frameon=False, fontsize=8)
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", transform=axes.transAxes)
