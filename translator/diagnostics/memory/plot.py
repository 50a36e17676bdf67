"""Accounts as a picture: bytes by length, and where a budget or the weights are passed."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from translator.console import write_bytes
from translator.diagnostics.latency.plot import picture_format

_STYLES = ("-", "--", ":", "-.")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_POINTS = 200

Curve = Callable[[int], int]
"""Bytes at a length."""


def lengths_until(longest: int) -> list[int]:
    """At most `_POINTS` lengths from 1 to `longest`, evenly apart."""
    return sorted({max(1, longest * point // _POINTS) for point in range(1, _POINTS + 1)} | {1, longest})


def plot(curves: Mapping[str, Curve], marks: Mapping[str, int], longest: int, path: Path) -> None:
    """Draws each curve from 1 to `longest` tokens and each mark as a level line, in the format of the file's name.

    Raises `UserError` when the file can't be written.
    """
    format = picture_format(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lengths = lengths_until(longest)
    for place, (name, curve) in enumerate(curves.items()):
        # Lines that lie on each other stay visible: several containers hold the same.
        axes.plot(
            lengths,
            [curve(length) / 1024**2 for length in lengths],
            label=name,
            color=_COLOURS[place % len(_COLOURS)],
            linestyle=_STYLES[place % len(_STYLES)],
        )
    for name, level in marks.items():
        axes.axhline(level / 1024**2, color="#777777", linewidth=1)
        axes.annotate(name, (1, level / 1024**2), va="bottom", fontsize=8, color="#555555")
    axes.set(xlabel="tokens held", ylabel="MiB", title="What a cache holds, by length")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    image = BytesIO()
    figure.savefig(image, format=format)
    write_bytes(path, image.getvalue())
