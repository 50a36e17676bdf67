#!/usr/bin/env python
"""What a change costs one cached step: operator calls, and time, of two source trees run in turn.

    git worktree add ../before v0.1
    scripts/step_cost.py --before ../before --after . --output results/step_cost.json

Each size decodes one sentence greedily from 40 source tokens, one thread, random weights, the same in both trees.
`calls` are PyTorch operators that one step dispatches (profiler). Times: `first` is start() and the first token,
`step` each later token, `whole` a pass over 40 tokens without a cache; `ratio` is after over before, of
neighbouring runs, A B A B …: median, and the least and greatest of the pairs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "64 x 4": {"d_model": 64, "nhead": 1, "dim_feedforward": 256, "num_decoder_layers": 4},
    "256 x 3": {"d_model": 256, "nhead": 4, "dim_feedforward": 1024, "num_decoder_layers": 3},
    "384 x 8": {"d_model": 384, "nhead": 6, "dim_feedforward": 1536, "num_decoder_layers": 8},
}
VOCABULARY, SOURCE, TOKENS = 8000, 40, 40
PARTS = ("first", "step", "whole")

MEASURE = """
import json, sys, time
import torch
from translator.config import ModelConfig
from translator.model import TranslationModel

sizes, vocabulary, source, tokens = json.loads(sys.argv[1])
torch.set_num_threads(1)
found = {}
for name, size in sizes.items():
    torch.manual_seed(0)
    model = TranslationModel(ModelConfig(vocab_size=vocabulary, num_encoder_layers=0, **size)).eval()
    for kind in ("dynamic", "static"):
        with torch.inference_mode():
            memory = model.encode(torch.randint(4, vocabulary, (1, source)))
            times = {"first": [], "step": [], "whole": []}
            for repeat in range(8):
                began = time.perf_counter()
                cache = model.start(memory, kind=kind, capacity=tokens + 1)
                token = torch.full((1, 1), 2)
                ids = [2]
                for t in range(tokens):
                    token = model.logits(model.decode(token, cache)[:, -1]).argmax(-1, keepdim=True)
                    ids.append(int(token))
                    if repeat:
                        times["first" if t == 0 else "step"].append(time.perf_counter() - began)
                    began = time.perf_counter()
                whole = torch.tensor([ids[:-1]])
                for _ in range(3):
                    began = time.perf_counter()
                    model.logits(model.decode(whole, memory)[:, -1])
                    times["whole"].append(time.perf_counter() - began)
            with torch.profiler.profile() as profiler:
                model.logits(model.decode(token, cache)[:, -1])
        calls = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
        found[f"{name}, {kind}"] = {"calls": calls}
        found[f"{name}, {kind}"] |= {part: 1e3 * sorted(some)[len(some) // 2] for part, some in times.items()}
print(json.dumps(found))
"""


def measured(tree: Path) -> dict[str, dict[str, float]]:
    """One process with that tree's code."""
    arguments = json.dumps([SIZES, VOCABULARY, SOURCE, TOKENS])
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, arguments],
        env=environment,
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measures, prints a line a size and writes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/step_cost.json"))
    options = parser.parse_args()
    pairs = [(measured(options.before), measured(options.after)) for _ in range(options.pairs)]
    results: dict[str, Any] = {}
    for name in pairs[0][0]:
        calls = {"before": pairs[0][0][name]["calls"], "after": pairs[0][1][name]["calls"]}
        results[name] = {"calls": calls}
        for part in PARTS:
            ratios = [after[name][part] / before[name][part] for before, after in pairs]
            results[name][part] = {
                "ms_before": statistics.median(before[name][part] for before, _ in pairs),
                "ms_after": statistics.median(after[name][part] for _, after in pairs),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
            }
        told = "  ".join(f"{part} x {results[name][part]['ratio']:.3f}" for part in PARTS)
        print(f"{name:18} calls {calls['before']} -> {calls['after']}   {told}")
    import torch  # after the measuring: it is not to run here

    from translator.diagnostics.latency.report import machine_facts

    revisions = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
        ).stdout.strip()
        for name, tree in (("before", options.before), ("after", options.after))
    }
    machine = {**machine_facts(torch.device("cpu")), "threads": 1}
    report = {"machine": machine, "revisions": revisions, "pairs": options.pairs, "sizes": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
