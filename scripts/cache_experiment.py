#!/usr/bin/env python
"""When does a K/V cache start to win? The experiment of the project's source text, and a sweep of sizes around it.

The text measured one translator (width 384, 8 decoder layers): without a cache 12 to 17 ms a token over 28 tokens, with
one a flat 19 ms, so that its cache lost at all 28. Here the same shape with random weights decodes greedily, batch 1,
from 40 source tokens, with both cache kinds and without a cache; then other widths, depths and target lengths.

* ratio at t: time to token t with the cache, `start()` included, over the time without one; paired in each repeat, then
  the median. Below 1 the cache has won by then.
* ahead from: the first token from which on that stays so.
* disturbed: another process got in the way of this size; measure again on an idle machine.
* tail: time a token in the last tenth of 256 tokens over that in the first tenth: 1 is flat.

Both sides use the same weights, precision and linear kernels; the encoder is in neither. What the columns of
milliseconds mean is told in `translator/diagnostics/latency/profile.py`.

    scripts/cache_experiment.py                     # about 10 minutes on two cores
    scripts/cache_experiment.py --quick             # seconds; a check that it runs, not a measurement
    scripts/cache_experiment.py --device cuda       # not measured by this project yet

Writes cache_experiment.json and cache_experiment.png to `--output`; the last line printed is JSON.
"""

import argparse
import json
from dataclasses import dataclass
from io import BytesIO
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from translator.config import ModelConfig, preset
from translator.diagnostics.latency.arms import LatencySettings
from translator.diagnostics.latency.plot import draw_tokens, label_axes
from translator.diagnostics.latency.profile import profile_latency
from translator.diagnostics.latency.report import LatencyReport, ahead_from
from translator.model import TranslationModel
from translator.textio import atomic_write_bytes

VOCABULARY, SOURCE, TARGET = 16000, 40, 28
CACHES = ("dynamic", "static")
MARKS = (1, 2, 4, 8, 28, 64, 128, 256)
MAX_RATIO_AT_1, MAX_TAIL, MAX_SPREAD = 1.02, 1.10, 1.5
REPEATS = {TARGET: 5, 256: 2}  # of whole targets, by length
OPENING = 4  # tokens measured many times over: there the two sides are closest


@dataclass
class Case:
    """One size at one number of threads: `opening` the first few tokens, many repeats; `whole` all tokens, fewer."""

    name: str
    threads: int
    opening: LatencyReport
    whole: LatencyReport

    def all_ratios(self, kind: str) -> list[float]:
        """Cumulative time over that without a cache at every token: the opening's, then those of the whole."""
        return [*self.opening.arms[kind].ratio, *self.whole.arms[kind].ratio[OPENING:]]

    def ratios(self, kind: str) -> dict[int, float]:
        """`all_ratios` at those of `MARKS` that lie within the length."""
        merged = self.all_ratios(kind)
        return {mark: merged[mark - 1] for mark in MARKS if mark <= len(merged)}

    def ahead_from(self, kind: str) -> int | None:
        """The first token from which on the cache stays ahead."""
        return ahead_from(self.all_ratios(kind))

    def meets_target(self, kind: str) -> bool:
        """At most 1.02 at the first token and ahead from the second."""
        return self.ratios(kind)[1] <= MAX_RATIO_AT_1 and (self.ahead_from(kind) or TARGET) <= 2

    def disturbed(self) -> bool:
        """Whether an arm's p95 is mostly half again its median: another process was running, so measure again."""
        arms = [*self.whole.arms.values(), *self.opening.arms.values()]
        return any(median(map(truediv, arm.p95_ms, arm.median_ms)) > MAX_SPREAD for arm in arms)

    def to_json(self) -> dict[str, Any]:
        """Plain values; lists by position."""
        return {
            "name": self.name,
            "threads": self.threads,
            "sizes": self.whole.sizes,
            "tokens": self.whole.settings.tokens,
            "disturbed": self.disturbed(),
            "load_before": {"opening": self.opening.machine["load_before"], "whole": self.whole.machine["load_before"]},
            "repeats": {"opening": self.opening.settings.repeats, "whole": self.whole.settings.repeats},
            "ratio": {kind: self.ratios(kind) for kind in CACHES},
            "ahead_from": {kind: self.ahead_from(kind) for kind in CACHES},
            "meets_target": {kind: self.meets_target(kind) for kind in CACHES},
            "opening": self.opening.to_json()["arms"],
            "whole": self.whole.to_json()["arms"],
        }


def sized(width: int, layers: int) -> ModelConfig:
    """The text's proportions at another width and depth: heads of 64, feed-forward four times the width."""
    return preset(
        "xianyan",
        VOCABULARY,
        d_model=width,
        nhead=max(1, width // 64),
        dim_feedforward=4 * width,
        num_encoder_layers=0,  # not timed
        num_decoder_layers=layers,
        max_positions=320,
    )


def plan(quick: bool) -> list[tuple[str, ModelConfig, int]]:
    """`(name, config, target tokens)`: the text's own first, then one thing changed at a time."""
    if quick:
        return [("width 64", sized(64, 2), 8)]
    cases = [("xianyan", sized(384, 8), TARGET)]
    cases += [(f"width {width}", sized(width, 4), TARGET) for width in (64, 128, 256, 384, 512, 1024)]
    cases += [(f"{layers} layers", sized(384, layers), TARGET) for layers in (2, 6)]
    return cases + [(f"xianyan, {tokens} tokens", sized(384, 8), tokens) for tokens in (64, 128, 256)]


def run_case(name: str, config: ModelConfig, tokens: int, seconds: float, **fixed: Any) -> Case:
    """Opening and whole of one size, the static cache with room for all tokens in both.

    A pilot tells how many repeats of the opening fit in `seconds`.
    """
    torch.manual_seed(0)
    model = TranslationModel(config)
    common: dict[str, Any] = {"source_length": SOURCE, "capacity": tokens, **fixed}
    first = {"tokens": min(OPENING, tokens), **common}
    pilot = profile_latency(model, LatencySettings(repeats=3, **first))
    cost = sum(sum(arm.wall_samples) for arm in pilot.arms.values()) / 3e3
    opening = profile_latency(model, LatencySettings(repeats=max(10, min(200, int(seconds / cost))), **first))
    whole = profile_latency(model, LatencySettings(repeats=REPEATS.get(tokens, 3), tokens=tokens, **common))
    return Case(name, fixed["threads"], opening, whole)


def table(cases: list[Case], kind: str) -> Table:
    """One row a case, one column a token."""
    result = Table(title=f"time with the {kind} cache ÷ without, to token …", title_justify="left")
    for name in ("size", "threads", "tokens", "start ms", "cached ms", "uncached ms"):
        result.add_column(name, justify="left" if name == "size" else "right")
    for mark in MARKS:
        result.add_column(str(mark), justify="right")
    result.add_column("ahead from", justify="right")
    for case in cases:
        ratios, cached, base = case.ratios(kind), case.whole.arms[kind], case.whole.arms["none"]
        result.add_row(
            case.name + " (disturbed)" * case.disturbed(),
            str(case.threads),
            str(case.whole.settings.tokens),
            f"{case.opening.arms[kind].start_ms:.2f}",
            *(f"{arm.median_ms[1]:.2f} → {arm.median_ms[-1]:.2f}" for arm in (cached, base)),
            *(f"{ratios[mark]:.3f}" if mark in ratios else "" for mark in MARKS),
            str(case.ahead_from(kind) or "never"),
        )
    return result


def picture(cases: list[Case], path: Path) -> None:
    """One row a thread count: the text's experiment, the longest target, and the ratios of every size."""
    threads = list(dict.fromkeys(case.threads for case in cases))
    figure = Figure(figsize=(15, 4.6 * len(threads)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    machine, settings = cases[0].whole.machine, cases[0].whole.settings
    figure.suptitle(
        f"{machine.get('gpu') or machine['cpu']}, {settings.dtype}, torch {machine['torch']}; batch 1, source "
        f"{SOURCE} tokens, vocabulary {VOCABULARY}; encoder not included; line: median, band: to p95"
    )
    for row, count in zip(figure.subplots(len(threads), 3, squeeze=False), threads, strict=True):
        mine = [case for case in cases if case.threads == count]
        for axes, case in zip(row, (mine[0], mine[-1]), strict=False):
            for name, arm in case.whole.arms.items():
                draw_tokens(axes, name, arm)
            what = f"width {case.whole.sizes['d_model']}, {case.whole.sizes['num_decoder_layers']} layers"
            label_axes(axes, "milliseconds for this token", f"{what}, {count} thread{'s'[: count > 1]}")
        for case in mine:
            if case.whole.settings.tokens <= TARGET:
                merged = case.all_ratios("dynamic")
                row[2].plot(range(1, len(merged) + 1), merged, label=case.name, linewidth=1)
        label_axes(row[2], "time to this token ÷ without a cache", "dynamic cache, start included; below 1 it has won")
        row[2].axhline(1, color="black", linewidth=1)
        row[2].legend(loc="upper right", frameon=False, ncols=2, fontsize=8)
    image = BytesIO()
    canvas.print_png(image)
    atomic_write_bytes(path, image.getvalue())


def tails(quick: bool, **fixed: Any) -> dict[str, float]:
    """Last tenth ÷ first tenth of 256 tokens, each cache alone."""
    torch.manual_seed(0)
    config, tokens, repeats = (sized(64, 2), 32, 2) if quick else (sized(384, 8), 256, 5)
    settings = LatencySettings(source_length=SOURCE, tokens=tokens, repeats=repeats, arms=CACHES, **fixed)
    return {name: arm.tail_ratio for name, arm in profile_latency(TranslationModel(config), settings).arms.items()}


def parse_arguments() -> argparse.Namespace:
    """The options, documented by `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads, one round each (1 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--seconds", type=float, default=3, help="time for the first tokens of each size (3)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and PNG (results)")
    parser.add_argument("--quick", action="store_true", help="one tiny size: a check that the script runs")
    return parser.parse_args()


def main() -> None:
    """Runs the plan for each thread count, prints the tables and writes both files."""
    options = parse_arguments()
    console = Console(width=190)
    cases, tail = [], {}
    for threads in options.threads:
        fixed = {"threads": threads, "device": options.device, "dtype": options.dtype}
        for name, config, tokens in plan(options.quick):
            cases.append(run_case(name, config, tokens, 0.2 if options.quick else options.seconds, **fixed))
            console.print(f"measured: {name}, {threads} threads", highlight=False)
        tail[threads] = tails(options.quick, **fixed)
    for kind in CACHES:
        console.print(table(cases, kind))
    fair = [case for case in cases if not case.disturbed()]
    summary = {
        "experiment": "cache",
        "cases": len(cases),
        "disturbed": len(cases) - len(fair),
        "within_1.02_at_1_and_ahead_from_2": {k: sum(c.meets_target(k) for c in fair) for k in CACHES},
        "worst_ratio_at_1": {k: round(max((c.ratios(k)[1] for c in fair), default=0.0), 3) for k in CACHES},
        "tail_ratio": {t: {k: round(v, 3) for k, v in values.items()} for t, values in tail.items()},
        "tail_within_1.10": all(values["static"] <= MAX_TAIL for values in tail.values()),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    everything = {
        "machine": cases[0].whole.machine,
        "dtype": options.dtype,
        "device": options.device,
        "source_length": SOURCE,
        "summary": summary,
        "cases": [case.to_json() for case in cases],
    }
    text = json.dumps(rounded(everything)) + "\n"
    atomic_write_bytes(options.output / "cache_experiment.json", text.encode())
    picture(cases, options.output / "cache_experiment.png")
    print(json.dumps(summary))


def rounded(value: Any) -> Any:
    """The same with every float at four digits after the point: a tenth of a microsecond."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
