#!/usr/bin/env python
"""What a search itself costs at each step: microseconds of Python and small operators around the model.

    scripts/search_cost.py --output results/search_cost.json

The model is a stub whose scores are ready made, so that neither its step nor the top-k over a vocabulary counts. No
target ends but by its length: `step_us` is the CPU time of a step, the least of many runs, one thread. `--profile`
prints instead where one grid's time goes.
"""

import argparse
import cProfile
import json
import pstats
import time
from pathlib import Path

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.engine import MatrixScores
from translator.search import Driver, Sentence, rows_per_sentence

VOCABULARY, STEPS, TURNS = 8000, 40, 16
SEARCHES = {
    "greedy": DecodeConfig(beam_size=1),
    "beam 4": DecodeConfig(beam_size=4),
    "beam 4, no repeats": DecodeConfig(beam_size=4, no_repeat_ngram_size=3),
    "sampling": DecodeConfig(sampling=True),
    "top-k 40": DecodeConfig(sampling=True, top_k=40),
    "top-p 0.9": DecodeConfig(sampling=True, top_p=0.9),
}


class ReadyMade:
    """`Scores` and `Decoding` in one: a few random matrices in turn, each of their top-k worked out once."""

    def __init__(self, batch_size: int, beams: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batch_size, self.beams = batch_size, beams
        self.rows, self.vocab_size = batch_size * beams, VOCABULARY
        self.matrices = [4 * torch.randn(self.rows, VOCABULARY, generator=generator) for _ in range(TURNS)]
        for matrix in self.matrices:
            matrix[:, :4] = -80  # nothing ends
        self.scores = [MatrixScores(matrix) for matrix in self.matrices]
        self.tops: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.turn = 0

    @property
    def log_z(self) -> Tensor:
        return self.scores[self.turn].log_z

    def step(self, tokens: Tensor) -> "ReadyMade":
        self.turn = (self.turn + 1) % TURNS
        return self

    def top(self, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if (k, self.turn) not in self.tops:
            self.tops[k, self.turn] = self.scores[self.turn].top(k)
        return self.tops[k, self.turn]

    def at(self, tokens: Tensor) -> Tensor:
        return self.scores[self.turn].at(tokens)

    def logits(self) -> Tensor:
        return self.matrices[self.turn]

    def reorder(self, beam: Tensor) -> None: ...


def driver_of(decoding: ReadyMade, config: DecodeConfig) -> Driver:
    """A driver with all of its steps before it."""
    sentence = Sentence(max_length=STEPS, start_id=2, end_id=3, suppressed=(0, 2))
    driver = Driver(config)
    driver.adopt(decoding, [sentence] * decoding.batch_size)
    return driver


def microseconds(decoding: ReadyMade, config: DecodeConfig, repeats: int) -> float:
    """CPU time of one step, the least of `repeats` means over `STEPS`."""
    driver_of(decoding, config).run()  # works out every top-k
    times = []
    for _ in range(repeats):
        driver = driver_of(decoding, config)
        began = time.process_time()
        driver.run()
        times.append(time.process_time() - began)
    return 1e6 * min(times) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--profile", nargs=2, metavar=("SEARCH", "B"), help="where the time of B sentences goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        config, B = SEARCHES[arguments.profile[0]], int(arguments.profile[1])
        decoding = ReadyMade(B, rows_per_sentence(config))
        driver_of(decoding, config).run()  # works out every top-k
        driver = driver_of(decoding, config)
        with cProfile.Profile() as profile:
            driver.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    found = {}
    for name, config in SEARCHES.items():
        for B in (1, 8, 64):
            decoding = ReadyMade(B, rows_per_sentence(config))
            found[f"{name}, {B} x {decoding.beams}"] = round(microseconds(decoding, config, arguments.repeats), 1)
            print(f"{name}, {B} x {decoding.beams}: {found[f'{name}, {B} x {decoding.beams}']} us", flush=True)
    result = {"step_us": found, "torch": torch.__version__, "threads": 1}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
