#!/usr/bin/env python3
"""How fast this project decodes beside CTranslate2 and Transformers: same weights, same inputs, one interleaved run.

    scripts/bench_decode.py --threads 1                      # everything
    scripts/bench_decode.py --threads 2 --only one file      # two sections; the file's others stay as they are
    scripts/bench_decode.py --quick --systems "eager" "ctranslate2 float32"

A translation is a *prefill*, the encoder's pass over all source tokens side by side, and then a *decode*: one pass of
the decoder for each target token, none of which can begin before the one before it has ended. With one sentence a pass
multiplies one row (beam 4: four) with every weight, so that its time is that of reading the weights, and smaller
weights are faster ones. With many sentences side by side it multiplies many rows, and arithmetic decides. So the two
are measured apart:

one        one sentence of 40 tokens, exactly 128 target tokens (the end suppressed in every system), greedy and beam 4
file       lines of mixed lengths, text to text: target tokens a wall second and a CPU second, each system in its best
           layout (batch, workers, threads), found on a part of the file before
plain      a plain nn.TransformerDecoder, 6 layers of 512, over 128 tokens: uncached, cached, packed
positions  a token after 512 others against one after 8, and how long reading the K and V between takes here
memory     peak megabytes beyond the imported libraries
start      process start to first translation, beside `import torch`

Every system lives in a process of its own and only one works at a time: A B C A B C …, so that a busy machine slows all
alike; "of X" is the median over rounds of the time divided by that of X in the same round. Models: the shipped one
("default") and preset `xianyan` with random weights and 1,024 positions. Random weights find tokens of almost equal
scores, where two systems may part; "agrees" is the share of equal tokens or texts.

Systems that aren't installed are named and left out: pip install ctranslate2 transformers.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from decoding import sections
from decoding.bench import ROOT, Bench
from decoding.models import mixed_lines, model_folders
from decoding.report import show_section, told
from decoding.systems import COMPUTE_TYPES, SYSTEMS

sys.path.insert(0, str(ROOT))

SECTIONS = ("one", "file", "plain", "positions", "memory", "start")
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def measured(section: str, bench: Bench, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one section."""
    models = ["default"] if given.quick else ["xianyan", "default"]
    if section == "one":
        return sections.one_sentence(bench, models, given.beams)
    if section == "file":
        return sections.file_of_lines(bench, "default", given.beams, mixed_lines(given.lines), given.file_rounds)
    if section == "plain":
        return sections.plain_decoders(bench, ("uncached", "cached", *COMPUTE_TYPES))
    if section == "positions":
        return sections.by_position(bench, "xianyan")
    if section == "memory":
        return sections.peak_memory(bench, mixed_lines(200))
    return sections.process_start(bench, given.rounds)


def main() -> None:
    """Measures, prints a table a section, writes the file, ends with one line of JSON."""
    given = options()
    began = time.monotonic()
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        models = ["default"] if given.quick and given.only == ["one"] else ["xianyan", "default"]
        folders = model_folders(models, Path(folder), say)
        bench = Bench(given.systems, folders, given.threads, given.rounds, say)
        figures = {}
        try:
            for section in given.only:
                figures[section] = measured(section, bench, given)
                show_section(section, figures[section], given.threads)
        finally:
            bench.close()
    report = {} if not given.output.exists() else json.loads(given.output.read_text(encoding="utf-8"))
    report |= {**figures, "machine": facts(given), "left out": bench.left, "seconds": time.monotonic() - began}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"threads": given.threads, **told(figures), "output": str(given.output)}))


def facts(given: argparse.Namespace) -> dict[str, Any]:
    """The machine, its processor's flags, and the versions of what was compared."""
    import torch

    from translator.diagnostics.latency.report import machine_facts

    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.exists() else set()
    versions = {}
    for package in ("ctranslate2", "transformers", "sentencepiece"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    own = {"threads": given.threads, "rounds": given.rounds, "flags": [flag for flag in FLAGS if flag in words]}
    return {**machine_facts(torch.device("cpu")), **own, **versions, "load": os.getloadavg()[0]}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=4, help="of one sentence, a plain decoder and starts")
    parser.add_argument("--file-rounds", type=int, default=2, help="each translates another part of the lines")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="the shipped model alone, 200 lines, 2 rounds")
    parser.add_argument("--output", type=Path, help="by default results/bench_decode_THREADS.json; sections are merged")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.file_rounds, given.lines = 2, 1, 200
    given.output = given.output or ROOT / "results" / f"bench_decode_{given.threads}.json"
    return given


if __name__ == "__main__":
    main()
