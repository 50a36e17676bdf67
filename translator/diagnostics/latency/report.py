"""What a latency profile found: samples, summaries, the machine they come from."""

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from translator.diagnostics.latency.arms import UNCACHED, LatencySettings
from translator.diagnostics.tables import as_text


@dataclass(slots=True)
class ArmLatency:
    """One arm's times in milliseconds. Raw samples first: one start a repeat, one list of `tokens` times a repeat.

    `wall_samples` time each whole pass from outside, start and bookkeeping included. `ratio` compares the cumulative
    time with `none` by position; empty without that arm. `cache_bytes` are allocated at the last token, K and V of the
    source included.
    """

    name: str
    start_samples: list[float]
    token_samples: list[list[float]]
    wall_samples: list[float]
    ratio: list[float] = field(default_factory=list)
    cache_bytes: int = 0

    @property
    def start_ms(self) -> float:
        """Median start; 0 for an arm that has none."""
        return statistics.median(self.start_samples)

    @property
    def median_ms(self) -> list[float]:
        """Median over repeats, by position."""
        return [statistics.median(times) for times in zip(*self.token_samples, strict=True)]

    @property
    def p95_ms(self) -> list[float]:
        """95th percentile over repeats (nearest rank: the slowest, below 20 repeats), by position."""
        return [sorted(times)[-(-95 * len(times) // 100) - 1] for times in zip(*self.token_samples, strict=True)]

    @property
    def first_token_ms(self) -> float:
        """Median of the first token, start not included."""
        return self.median_ms[0]

    @property
    def cumulative_ms(self) -> list[float]:
        """Median start plus the medians of all tokens up to each position."""
        total, sums = self.start_ms, []
        for value in self.median_ms:
            total += value
            sums.append(total)
        return sums

    @property
    def tail_ratio(self) -> float:
        """Last tenth ÷ first tenth of the positions, first token apart; 1 is flat. The median over repeats."""
        ratios = []
        for times in self.token_samples:
            later = times[1:] or times
            tenth = max(1, len(later) // 10)
            ratios.append(statistics.median(later[-tenth:]) / statistics.median(later[:tenth]))
        return statistics.median(ratios)

    @property
    def ahead_from(self) -> int | None:
        """The first token from which on the cumulative time stays below that of `none`, or None if it never does."""
        return ahead_from(self.ratio)

    def to_json(self) -> dict[str, Any]:
        """Everything but the raw samples, as plain values."""
        return {
            "start_ms": self.start_ms,
            "first_token_ms": self.first_token_ms,
            "median_ms": self.median_ms,
            "p95_ms": self.p95_ms,
            "cumulative_ms": self.cumulative_ms,
            "wall_ms": statistics.median(self.wall_samples),
            "tail_ratio": self.tail_ratio,
            "cumulative_ratio_to_none": self.ratio,
            "ahead_from_token": self.ahead_from,
            "cache_bytes": self.cache_bytes,
        }


@dataclass(slots=True)
class LatencyReport:
    """The outcome of `profile_latency`: one `ArmLatency` for each arm, the sizes and the machine they were taken on.

    `ties` counts positions where arms picked different tokens because two logits were equal but for rounding.
    """

    settings: LatencySettings
    sizes: dict[str, int]
    machine: dict[str, Any]
    arms: dict[str, ArmLatency]
    ties: int

    def __str__(self) -> str:
        return as_text(latency_table(self))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`; times in milliseconds, lists by position."""
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        return {
            "unit": "milliseconds",
            "encoder_included": False,
            "machine": self.machine,
            "sizes": self.sizes,
            "settings": {**settings, "arms": list(self.settings.arms)},
            "ties": self.ties,
            "arms": {name: arm.to_json() for name, arm in self.arms.items()},
        }


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
        times = [arm.start_ms, arm.first_token_ms, statistics.median(later), statistics.median(slow)]
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


def ahead_from(ratios: Sequence[float]) -> int | None:
    """The first position, counted from 1, from which on all ratios are below 1; None if the last isn't."""
    behind = [position for position, ratio in enumerate(ratios, start=1) if ratio >= 1]
    first = max(behind, default=0) + 1
    return first if first <= len(ratios) else None


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, cores, threads, versions, date; no host name."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
