"""The workloads, each a function from a `Bench` to figures: numbers by system, and what they are ratios of."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from decoding.bench import ROOT, Bench, Runs
from decoding.models import source_ids

Figures = dict[str, Any]

RIVALS = ("ctranslate2 float32", "ctranslate2 int8", "transformers")
TOKENS = 128  # of the one sentence
LONGEST = 80  # tokens of a translation of a file's line
SLOW = ("nn.TransformerDecoder", "transformers compiled")  # one greedy round of these tells enough
# Of a file's lines these get every so many-th, greedy and with more beams, once: what counts is tokens a second.
SHARE = {"transformers": (4, 16), "eager": (2, 2)}
TRIED = 64  # lines that layouts are tried on


def one_sentence(bench: Bench, models: Sequence[str], beams: Sequence[int]) -> Figures:
    """One sentence, exactly `TOKENS` target tokens; encoder and all included."""
    figures: Figures = {}
    for model in models:
        ids = source_ids(8000)
        for width in beams:
            job = {"job": "one", "model": model, "ids": ids, "beams": width, "tokens": TOKENS}
            names = [name for name in bench.names if width == 1 or name not in SLOW]
            runs = bench.interleaved(dict.fromkeys(names, job), once=(*SLOW, "transformers"))
            figures[f"{model}, beam {width}"] = summary(runs, TOKENS)
    return figures


def file_of_lines(bench: Bench, model: str, beams: Sequence[int], lines: Sequence[str], rounds: int) -> Figures:
    """Files, from text to text, another part of `lines` in each round; each system in its fastest layout."""
    figures: Figures = {"lines": len(lines), "rounds": rounds, "longest": LONGEST}
    for width in beams:
        jobs, layouts = {}, {}
        for name in bench.names:
            found = None if name in SLOW else best_layout(bench, name, model, width, lines[:TRIED])
            if found is not None:
                layouts[name] = bench.layouts[name] = found
                jobs[name] = {"job": "file", "model": model, "beams": width, "longest": LONGEST, "layout": found}

        def part(name: str, number: int, width: int = width) -> dict[str, Any]:
            """The lines of that round that the system gets."""
            share = SHARE.get(name, (1, 1))[width > 1]
            return {"lines": lines[number::rounds][::share], "every": share}

        runs = bench.interleaved(jobs, rounds, once=SHARE, warm=False, more=part)
        figures[f"beam {width}"] = summary(runs)
        for name, found in figures[f"beam {width}"].items():
            found["layout"] = layouts[name]
    return figures


def best_layout(bench: Bench, name: str, model: str, beams: int, lines: Sequence[str]) -> dict[str, Any] | None:
    """The layout that takes the least wall time for `lines`, the first run of all apart; None without any."""
    known = bench.ask(name, job="layouts", model=model)
    job = {"job": "file", "model": model, "beams": beams, "longest": LONGEST, "lines": list(lines)}
    times: list[tuple[float, int]] = []
    layouts = known["layouts"] if known else []
    for number, layout in enumerate([*layouts[:1], *layouts]):
        answer = bench.ask(name, **job, layout=layout)
        if answer is None:
            return None
        if number:
            times.append((answer["wall"], number - 1))
    return layouts[min(times)[1]] if times else None


def plain_decoders(bench: Bench, kinds: Sequence[str]) -> Figures:
    """A plain `nn.TransformerDecoder`, 6 layers of 512, `TOKENS` tokens: uncached, cached, packed."""
    jobs = {kind: {"job": "plain", "kind": kind, "tokens": TOKENS} for kind in kinds}
    runs = bench.interleaved(jobs, once=("uncached",))
    figures = summary(runs, TOKENS, against=("uncached",))
    for kind, found in figures.items():
        found["output"] = runs[kind][0]["output"]
    return figures


def by_position(bench: Bench, model: str, near: int = 8, far: int = 512) -> Figures:
    """A token late against a token early, and the time that reading the K and V between them takes."""
    names = [name for name in bench.names if name.startswith(("eager", "packed"))]
    job = {"job": "positions", "model": model, "near": near, "far": far, "steps": 12}
    runs = bench.interleaved(dict.fromkeys(names, job), rounds=2, warm=False)
    rates = [answer["bandwidth"] for name in runs if (answer := bench.ask(name, job="bandwidth"))]
    figures: Figures = {"near": near, "far": far, "read_bytes_a_second": max(rates, default=None)}
    for name, found in runs.items():
        best = min(found, key=lambda answer: answer["added_ms"])
        reading = 1e3 * best["added_bytes"] / max(rates)
        figures[name] = {**best, "reading_ms": reading, "ratio": best["added_ms"] / reading}
    return figures


def peak_memory(bench: Bench, lines: Sequence[str]) -> Figures:
    """Peak megabytes beyond the imported libraries, a new process each: one sentence of `xianyan`, a file; beam 4."""
    one = {"job": "one", "model": "xianyan", "ids": source_ids(8000), "beams": 4, "tokens": TOKENS}
    file = {"job": "file", "model": "default", "beams": 4, "longest": LONGEST, "lines": list(lines)}
    figures: Figures = {}
    for name in bench.names:
        if name in SLOW:
            continue
        tasks = {"xianyan, one sentence": one, "default, file": {**file, "layout": bench.layouts[name]}}
        for what, task in tasks.items():
            answer = bench.fresh(name, job="memory", task=task)
            if answer is not None:
                figures.setdefault(name, {})[what] = answer["megabytes"]
    return figures


def process_start(bench: Bench, rounds: int) -> Figures:
    """Seconds from nothing to the first translation, in turn with a process that only imports torch."""
    translate = [sys.executable, "-m", "translator", "translate", "--threads", str(bench.threads), "How are you?"]
    commands = {"import torch": [sys.executable, "-c", "import torch"], "translator translate": translate}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            if number:  # the first brings files from the disk
                times[name].append(time.perf_counter() - began)
    figures: Figures = {
        name: {"median": statistics.median(found), "least": min(found)} for name, found in times.items()
    }
    pairs = zip(times["translator translate"], times["import torch"], strict=True)
    figures["beyond import torch"] = statistics.median(mine - torch for mine, torch in pairs)
    return figures


def summary(runs: Runs, tokens: int | None = None, against: Sequence[str] = RIVALS) -> Figures:
    """Each system's milliseconds a token (medians and least), tokens a second, and ratios to others, round by round.

    `agrees`: the share of what it found (tokens of the one sentence, texts of a file) that the reference found too.
    """
    reference = next((name for name in ("eager", "ctranslate2 float32") if name in runs), None)
    figures: Figures = {}
    for name, rounds in runs.items():
        if not rounds:
            continue
        each = {clock: [1e3 * one[clock] / (tokens or one["tokens"]) for one in rounds] for clock in ("wall", "cpu")}
        figures[name] = {
            **{f"{clock}_ms": statistics.median(times) for clock, times in each.items()},
            **{f"{clock}_ms_least": min(times) for clock, times in each.items()},
            "tokens_a_wall_second": 1e3 / statistics.median(each["wall"]),
            "tokens_a_cpu_second": 1e3 / statistics.median(each["cpu"]),
            "rounds": len(rounds),
        }
        for other in against:
            if other != name and runs.get(other):
                figures[name][f"of {other}"] = {
                    clock: statistics.median(
                        (mine[clock] / (tokens or mine["tokens"])) / (theirs[clock] / (tokens or theirs["tokens"]))
                        for mine, theirs in zip(rounds, runs[other], strict=False)
                    )
                    for clock in ("wall", "cpu")
                }
        if reference is not None and name != reference:
            figures[name]["agrees"] = agreement(rounds[0], runs[reference][0])
    return figures


def agreement(mine: dict[str, Any], theirs: dict[str, Any]) -> float | None:
    """The share of places (tokens of the one sentence, lines that both had) at which both found the same."""
    for kind in ("texts", "tokens"):
        if isinstance(mine.get(kind), list):
            one, other = (
                {place * found.get("every", 1): value for place, value in enumerate(found[kind])}
                for found in (mine, theirs)
            )
            common = one.keys() & other.keys()
            return sum(one[place] == other[place] for place in common) / len(common)
    return None
