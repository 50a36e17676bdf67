#!/usr/bin/env python
"""Everything that needs a GPU, in under five minutes; the JSON is written anew after each section.

    scripts/gpu_checks                                   # cuda, to results/gpu/gpu_checks.json
    scripts/gpu_checks --device cpu --small --output checks.json    # does it run? small models, no figures

A section that fails or runs out of time is recorded with what it had, and the next one runs. Times are CUDA events (the
clock on a CPU). *Cached* means one token a step over kept K and V, *uncached* the whole prefix at each step, *not
captured* the graphs engine's own steps run from Python, each time anew. The last line printed is JSON; exit status 1
when a section failed.
"""

import argparse
import copy
import json
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_arms import (
    TYPES,
    Marks,
    engines,
    greedy_times,
    models,
    search_seconds,
    sources,
    step_bytes,
    summary,
    transformers_seconds,
    uncached_times,
)

from translator.cache import CACHE_KINDS, CacheSpec
from translator.checkpoint import DEFAULT_CHECKPOINT, read_checkpoint
from translator.diagnostics.latency.report import machine_facts
from translator.diagnostics.parity.bench import SpecialIds
from translator.diagnostics.parity.check import LINES, parity_of
from translator.diagnostics.parity.self_test import SOURCE_LENGTHS
from translator.diagnostics.subject import ModelSubject
from translator.engine.base import Engine
from translator.engine.eager import EagerEngine
from translator.engine.graphs import GraphEngine
from translator.model import TranslationModel
from translator.pipeline import Translator

Found = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What every section gets."""

    device: torch.device
    small: bool
    models: dict[str, TranslationModel]

    def size(self, small: int, large: int) -> int:
        """A number of tokens, sentences or repeats."""
        return small if self.small else large


def bandwidth(setup: Setup, found: Found) -> None:
    """GB/s of a copy larger than any cache, read and written bytes counted; and what starting a kernel costs."""
    count = setup.size(1 << 22, 1 << 30)
    source = torch.ones(count, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    times = repeated(setup, lambda: target.copy_(source), 20)
    found["copy_gb_s"] = 2 * count / min(times) / 1e6
    small = torch.zeros(1, device=setup.device)
    found["kernel_start_us"] = 1e3 * statistics.median(repeated(setup, lambda: small.add_(1), 200))


def repeated(setup: Setup, work: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of each run, after two that don't count."""
    marks = Marks(setup.device)
    for _ in range(times + 3):
        marks.mark()
        work()
    return marks.between()[2:]


def engine_parity(setup: Setup, found: Found) -> None:
    """Every engine and type here against fp64 on the CPU: logits of given tokens while beams move and sentences leave.

    fp32 has to agree to 1e-3; the half types are reported.
    """
    model, steps = setup.models["xianyan"], setup.size(20, 70)
    exact = EagerEngine(copy.deepcopy(model).to("cpu", torch.float64))
    expected = given_tokens(exact, model, steps)
    found["largest_logit"] = max(float(logits.abs().max()) for logits in expected)
    for name, engine in engines(model, tuple(TYPES)).items():
        pairs = list(zip(given_tokens(engine, model, steps), expected, strict=True))
        worst = max(float((mine.double() - theirs).abs().max()) for mine, theirs in pairs)
        best = [mine.argmax(dim=1) == theirs.argmax(dim=1) for mine, theirs in pairs]
        same = statistics.mean(torch.cat(best).double().tolist())
        found[name] = {"max_difference": worst, "best_token_equal": same}
    wrong = [name for name in found if name.endswith("float32") and not found[name]["max_difference"] < 1e-3]
    if wrong:
        raise AssertionError(f"{', '.join(wrong)}: further from fp64 than 1e-3")


@torch.no_grad()
def given_tokens(engine: Engine, model: TranslationModel, steps: int) -> list[torch.Tensor]:
    """Logits on the CPU of a short life of a grid, the same whatever the engine."""
    ids, hidden = (part.to(engine.device) for part in sources(model, 6, 20))
    random = torch.Generator().manual_seed(1)
    decoding = engine.start(engine.encode(ids, hidden), hidden, CacheSpec(beams=3))
    found = []
    for t in range(steps):
        tokens = torch.randint(4, engine.vocab_size, (decoding.batch_size * 3,), generator=random)
        found.append(decoding.step(tokens).logits().to("cpu", copy=True))  # they hold until the next step
        if t == steps // 2:
            decoding.compact(torch.tensor([4, 0, 3]))
            newcomer = engine.start(engine.encode(ids[:1], hidden[:1]), hidden[:1], CacheSpec(beams=3))
            decoding.admit([1], newcomer)
        if t % 3 == 2:
            decoding.reorder(torch.randint(3, (decoding.batch_size, 3), generator=random))
    return found


def latency(setup: Setup, found: Found) -> None:
    """Milliseconds a token of one sentence of 40 source tokens, 128 target tokens."""
    tokens, repeats = setup.size(10, 128), setup.size(1, 5)
    for size, model in setup.models.items():
        ids, hidden = sources(model, 1, setup.size(12, 40))
        here = found.setdefault(size, {})
        for name, engine in engines(model, ("float32", "bfloat16")).items():
            passes = [greedy_times(engine, ids, hidden, tokens, tokens) for _ in range(repeats + 1)][1:]
            here[f"cached, {name}"] = summary([min(times) for times in zip(*passes, strict=True)])
        for dtype in ("float32", "bfloat16"):
            converted = copy.deepcopy(model).to(TYPES[dtype])
            passes = [uncached_times(converted, ids, hidden, tokens) for _ in range(3)][1:]
            here[f"uncached, {dtype}"] = summary([min(times) for times in zip(*passes, strict=True)])


def bytes_moved(setup: Setup, found: Found) -> None:
    """Bytes a step has to read over its time, at few and at many tokens, beside what a copy reaches."""
    measured: Found = {}
    bandwidth(setup, measured)
    reached, few, many = measured["copy_gb_s"], setup.size(4, 8), setup.size(30, 512)
    for size, model in setup.models.items():
        for batch in (1, setup.size(2, 64)):
            ids, hidden = sources(model, batch, setup.size(12, 40))
            for dtype in ("float32", "bfloat16"):
                engine = GraphEngine(model, TYPES[dtype])
                passes = [greedy_times(engine, ids, hidden, many + 8, many + 8) for _ in range(setup.size(2, 4))][1:]
                times = [statistics.median(step) for step in zip(*passes, strict=True)]
                here = found.setdefault(f"{size}, {batch} sentences, {dtype}", {"copy_gb_s": reached})
                moved = {}
                for held in (few, many):
                    ms = statistics.median(times[held - 3 : held + 5])
                    parts = step_bytes(model, TYPES[dtype].itemsize, batch, held, ids.shape[1])
                    moved[held] = (ms, parts["target_kv"])
                    gb_s = sum(parts.values()) / ms / 1e6
                    here[f"at {held} tokens"] = {"ms": ms, **parts, "gb_s": gb_s, "of_copy": gb_s / reached}
                added = moved[many][0] - moved[few][0]
                least = (moved[many][1] - moved[few][1]) / reached / 1e6
                here["added_ms"], here["added_ms_over_bytes_at_copy_speed"] = added, added / least


def bulk(setup: Setup, found: Found) -> None:
    """Target tokens a second of whole searches, sources and all: greedy and beam 4, by number of sentences at once."""
    tokens, length = setup.size(6, 32), setup.size(8, 24)
    most, model = setup.size(4, 512), setup.models["xianyan"]
    some = engines(model, ("bfloat16",))
    for beams in (1, 4):
        for name in ("graphs bfloat16", "eager bfloat16"):
            here = found.setdefault(f"{name}, {'greedy' if beams == 1 else f'beam {beams}'}", {})
            batch = 1
            while batch <= most:
                ids, hidden = sources(model, batch, length)
                seconds = [search_seconds(some[name], ids, hidden, tokens, beams) for _ in range(setup.size(2, 3))]
                here[str(batch)] = batch * tokens / min(seconds[1:])
                batch *= 2


def translations(setup: Setup, found: Found) -> None:
    """The shipped model's lines, as plain fp32 on the CPU translates them: how many come out the same."""
    checkpoint = read_checkpoint(DEFAULT_CHECKPOINT)
    lines = list(LINES)[: setup.size(3, len(LINES))]
    plain = Translator(checkpoint, engine=EagerEngine(checkpoint.model))
    moved = copy.deepcopy(checkpoint.model).to(setup.device)
    for beams in (1, 4):
        expected = plain.translate(lines, beam_size=beams)
        for name in TYPES:
            here = Translator(checkpoint, engine=GraphEngine(moved, TYPES[name]))
            same = sum(a == b for a, b in zip(here.translate(lines, beam_size=beams), expected, strict=True))
            found[f"{name}, beam {beams}"] = f"{same} of {len(lines)} lines the same"


def container_parity(setup: Setup, found: Found) -> None:
    """`translator parity` on this device: every container against both references, fp32 and bf16."""
    torch.manual_seed(0)
    model = setup.models["xianyan"]
    random = torch.Generator().manual_seed(3)
    ids = [torch.randint(4, model.config.vocab_size, (n,), generator=random).tolist() for n in SOURCE_LENGTHS]
    report = parity_of(
        [ModelSubject(model, ids)],
        SpecialIds(),
        kinds=list(CACHE_KINDS)[:1] if setup.small else CACHE_KINDS,
        dtypes=(torch.float32, torch.bfloat16),
        beam_size=3,
        max_tokens=setup.size(6, 24),
    )
    found["report"] = str(report).splitlines()
    if not report.passed:
        raise AssertionError("a check failed: see the report")


def by_transformers(setup: Setup, found: Found) -> None:
    """Milliseconds a token of Transformers' generate: static cache, compiled as it does on this device."""
    try:
        import transformers
    except ModuleNotFoundError:
        found["skipped"] = "transformers is not installed"
        return
    found["transformers"] = transformers.__version__
    tokens = setup.size(8, 128)
    for size, model in setup.models.items():
        ids, _ = sources(model, 1, setup.size(12, 40))
        for name in ("float32", "bfloat16"):
            run = transformers_seconds(model, ids, tokens, TYPES[name])
            seconds = [run() for _ in range(setup.size(2, 5))]
            found[f"{size}, {name}"] = {"ms_a_token": 1e3 * min(seconds[1:]) / tokens, "first_s": seconds[0]}


def tests(setup: Setup, found: Found) -> None:
    """The tests that need a GPU."""
    if setup.device.type != "cuda":
        found["skipped"] = "they need a CUDA device"
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q"], capture_output=True, text=True, timeout=120, check=False
    )
    found["tail"] = (done.stdout + done.stderr).splitlines()[-40:]
    if done.returncode:
        raise AssertionError(f"pytest ended with status {done.returncode}")


SECTIONS: dict[Callable[[Setup, Found], None], int] = {
    bandwidth: 20,
    engine_parity: 50,
    latency: 70,
    bulk: 60,
    bytes_moved: 40,
    translations: 30,
    container_parity: 40,
    by_transformers: 60,
    tests: 60,
}
"""In order, with the most seconds that each may take."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` inside when time is up."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_section(section: Callable[[Setup, Found], None], setup: Setup, seconds: float) -> Found:
    """What it found, however it ended."""
    found: Found = {}
    entry: Found = {"verdict": "done", "found": found}
    began = time.perf_counter()
    try:
        with limited(seconds):
            section(setup, found)
    except Exception as error:
        traceback.print_exc()
        entry["verdict"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    entry["seconds"] = round(time.perf_counter() - began, 2)
    return entry


def main() -> int:
    """Runs the sections and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models and few tokens: does it run?")
    parser.add_argument("--output", type=Path, default=Path("results/gpu/gpu_checks.json"))
    parser.add_argument("--seconds", type=float, default=285, help="for all of it")
    parser.add_argument("--only", nargs="*", choices=[section.__name__ for section in SECTIONS], metavar="SECTION")
    options = parser.parse_args()
    began, device = time.perf_counter(), torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_checks: this machine has no CUDA device; --device cpu --small shows that the checks run")
        return 2
    if options.small:
        torch.set_num_threads(1)
    setup = Setup(device, options.small, models(options.small, device))
    report: Found = {"machine": machine_facts(device), "small": options.small, "sections": {}}
    report["machine"]["cuda"] = torch.version.cuda
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for section, limit in SECTIONS.items():
        if options.only is not None and section.__name__ not in options.only:
            continue
        left = options.seconds - (time.perf_counter() - began)
        entry = run_section(section, setup, min(limit, left))
        report["sections"][section.__name__] = entry
        written = options.output.with_suffix(".part")
        written.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        written.replace(options.output)
        print(f"{section.__name__:18} {entry['seconds']:7.1f} s  {entry['verdict']}", flush=True)
    verdicts = {name: entry["verdict"] for name, entry in report["sections"].items()}
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1), **verdicts}))
    return int(any(verdict != "done" for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
