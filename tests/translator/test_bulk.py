"""Many lines: in order whatever they hold, equal sentences once, in the memory of a few windows, on any workers."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ENGLISH, tiny_tokenizer, tiny_translator
from tests.translator.echo import EchoDecoding, EchoEngine
from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.errors import UserError
from translator.pipeline import Translator, bulk

ROOT = Path(__file__).resolve().parents[2]
GREEDY = DecodeConfig(beam_size=1)


class Watched(EchoEngine):
    """Remembers the sources it was asked to decode; `before` a decoding, a test may interfere."""

    def __init__(self, most: int = 1 << 20) -> None:
        tokenizer = tiny_tokenizer()
        super().__init__(tokenizer.vocab_size, tokenizer.eos_id, most)
        self.batches: list[int] = []

    def start(self, memory: Any, key_padding_mask: Tensor | None, spec: CacheSpec) -> EchoDecoding:
        self.before(memory)
        self.batches.append(len(memory))
        return super().start(memory, key_padding_mask, spec)

    def before(self, memory: Tensor) -> None: ...

    @property
    def decoded(self) -> int:
        return sum(self.batches)


def echo(engine: EchoEngine | None = None, **options: Any) -> Translator:
    return tiny_translator(engine=engine or Watched(), **options)


def in_windows(lines: Sequence[str], *sizes: int) -> Iterator[list[str]]:
    rest = iter(lines)
    for size in sizes:
        yield list(islice(rest, size))
    yield list(rest)


def texts(results: Any) -> list[str]:
    return [candidates[0].text for _, found in results for candidates in found]


def workers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("translator")]


# -- order -----------------------------------------------------------------------------------------------------------


def pathological() -> list[str]:
    """Blank lines, equal ones, very long ones, lines of one and of many sentences, in no order."""
    words = " ".join(ENGLISH).split()
    lines = []
    for number in range(600):
        word = words[number % len(words)]
        lines += [f"{number} {word}", "", word, "\u3000 ", " ".join(ENGLISH[: number % 5]), "Yes."]
    lines[100] = "word " * 3000
    lines[2000] = " ".join(f"{number} {word}." for number, word in enumerate(words * 3))
    lines[2001:2001] = ["Yes."] * 500
    return [*lines, "", ""]


@pytest.mark.parametrize("config", [GREEDY, DecodeConfig(beam_size=3)], ids=["greedy", "beam"])
@pytest.mark.parametrize("workers", [1, 3])
def test_lines_come_out_in_order_whatever_they_hold(workers: int, config: DecodeConfig) -> None:
    """The model says each sentence again, so that a line in another's place shows."""
    lines = pathological()
    translator = echo(batch_tokens=500, workers=workers)
    got = texts(translator.windows(in_windows(lines, 1, 700, 2, 900, 0), config, split=False))
    assert len(got) == len(lines)
    for line, text in zip(lines, got, strict=True):
        spoken = " ".join(line.split())
        longer = len(translator.tokenizer.encode(spoken)) >= translator.engine.max_positions
        assert spoken.startswith(text) and len(text) > 50 if longer else text == spoken
    assert got == texts(translator.windows([lines], config, split=False))


def test_a_model_gives_the_same_on_one_worker_and_on_three() -> None:
    lines = [line for line in pathological() if len(line) < 300][:400]
    one, three = (
        [found for _, found in tiny_translator(workers=workers, batch_tokens=400).windows(in_windows(lines, 150, 60))]
        for workers in (1, 3)
    )
    assert one == three


# -- once ------------------------------------------------------------------------------------------------------------


def test_equal_sentences_are_decoded_once() -> None:
    engine = Watched()
    lines = ["Yes.", "No.", "Yes.", "Yes. No. Yes.", "  Yes. "] * 40
    assert echo(engine).translate(lines, GREEDY) == ["Yes.", "No.", "Yes.", "Yes.No.Yes.", "Yes."] * 40
    assert engine.decoded == 2


def test_a_sentence_of_an_earlier_window_is_not_decoded_again() -> None:
    engine, seen = Watched(), list[tuple[int, ...]]()
    translator = echo(engine, workers=2)
    results = translator.windows(
        [["Yes."], ["No.", "Yes."], ["Yes.", "No.", "Well."]],
        GREEDY,
        report=lambda t: seen.append((t.lines, t.sentences, t.searched, t.tokens)),
    )
    assert texts(results) == ["Yes.", "No.", "Yes.", "Yes.", "No.", "Well."]
    assert engine.decoded == 3
    assert seen[-1][:3] == (6, 6, 3) and [lines for lines, *_ in seen] == [1, 3, 6]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_REMEMBERED", 5000)
    engine = Watched()
    lines = ["One", "Two", "Yes.", "One", "Four", "Five", "Six", "Two", "One"]
    assert texts(echo(engine).windows([[line] for line in lines], GREEDY)) == lines
    assert engine.decoded == 8, "'One' was met again soon, and 'Two' and 'One' after too long"


def test_another_prefix_is_another_sentence() -> None:
    engine = Watched()
    echo(engine).translate(["Yes."] * 4, GREEDY, prefixes=["", "猫", "猫", "狗"])
    assert engine.decoded == 3


def test_every_sample_is_drawn_for_itself() -> None:
    engine = Watched()
    echo(engine).translate(["Yes.", "Yes.", "Yes. Yes."], DecodeConfig(sampling=True))
    assert engine.decoded == 4
    drawn = tiny_translator().translate(["I would like a cup."] * 8, DecodeConfig(sampling=True, temperature=2.0))
    assert len(set(drawn)) > 4


# -- memory ----------------------------------------------------------------------------------------------------------

LONG_RUN = """
import resource
from tests.translator.test_bulk import echo, Watched
from translator.pipeline import bulk

bulk.MOST_REMEMBERED = 1 << 20
most, done = [], 0
lines = ([f"{number:x}" for number in range(first, first + 2000)] for first in range(0, 50_000, 2000))
for window, found in echo(Watched(most=0), workers=2).windows(lines, beam_size=1, split=False):
    done += len(found)
    most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(done, most[len(most) // 4], most[-1])
"""


def test_memory_does_not_grow_with_the_file() -> None:
    """50,000 different lines: to keep the last 37,500 would take some 40 MB."""
    run = subprocess.run([sys.executable, "-c", LONG_RUN], capture_output=True, text=True, cwd=ROOT, check=True)
    done, early, late = map(int, run.stdout.split())
    assert done == 50_000
    assert late - early < 12, f"from {early} to {late} MiB"


def test_no_more_is_read_than_a_few_windows() -> None:
    read, returned = 0, 0

    def windows() -> Iterator[list[str]]:
        nonlocal read
        for number in range(50):
            read += 1
            yield [f"{number} a", f"{number} b"]

    for _ in echo(workers=2, batch_tokens=8).windows(windows(), GREEDY):
        returned += 1
        assert read <= returned + bulk.AHEAD
    assert returned == 50


# -- as lines arrive -------------------------------------------------------------------------------------------------


def test_what_was_read_comes_before_waiting_for_more() -> None:
    arrived: list[list[str]] = [["One"], ["Two"]]

    def windows() -> Iterator[list[str]]:
        while arrived:
            yield arrived.pop(0)

    results = echo().windows(windows(), GREEDY, ready=lambda: bool(arrived))
    assert next(results)[0] == ["One"]
    arrived.append(["Three"])
    assert [lines for lines, _ in results] == [["Two"], ["Three"]]


# -- workers ---------------------------------------------------------------------------------------------------------


def test_several_workers_decode_at_once() -> None:
    """Three meet inside the model, which one after another they could not."""

    class Met(Watched):
        barrier = threading.Barrier(3, timeout=20)

        def before(self, memory: Tensor) -> None:
            self.barrier.wait()

    lines = ["One", "One two three", "One two three four five six"]
    assert echo(Met(), workers=3, batch_tokens=1).translate(lines, GREEDY) == lines
    assert not workers_alive()


def test_one_batch_is_decoded_by_whoever_asks_and_more_by_workers_of_fewer_threads() -> None:
    """The caller's own number of threads stays what it was, and so does a new thread's."""

    class Counted(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.threads: list[tuple[str, int]] = []

        def before(self, memory: Tensor) -> None:
            self.threads.append((threading.current_thread().name, torch.get_num_threads()))

    engine, given = Counted(), torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        echo(engine, workers=2).translate(["One"], GREEDY)
        assert engine.threads == [(threading.current_thread().name, 5)]
        engine.threads.clear()
        echo(engine, workers=2, batch_tokens=1).translate(["One", "Two"], GREEDY)
        assert {threads for _, threads in engine.threads} == {2}
        assert all(name.startswith("translator") for name, _ in engine.threads)
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [torch.get_num_threads(), *fresh] == [5, 5]
    finally:
        torch.set_num_threads(given)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_fails_in_a_worker_is_raised_and_no_thread_stays(workers: int) -> None:
    class Failing(Watched):
        def before(self, memory: Tensor) -> None:
            if len(self.batches) == 4:
                raise UserError("the fifth is too much")

    results = echo(Failing(), workers=workers, batch_tokens=1).windows([["One", "Two"], [*"abcdefghij"]], GREEDY)
    with pytest.raises(UserError, match="the fifth"):
        list(results)
    assert not workers_alive()


def test_a_run_given_up_ends_soon() -> None:
    """In the middle of long targets, and though many batches wait."""

    class Slow(EchoDecoding):
        def step(self, tokens: Tensor) -> Any:
            time.sleep(0.05)
            return super().step(tokens)

    class Sleepy(Watched):
        def start(self, memory: Any, key_padding_mask: Tensor | None, spec: CacheSpec) -> EchoDecoding:
            return (Slow if memory.shape[1] > 10 else EchoDecoding)(self, memory, spec.beams)

    lines = [["Yes."], *[[f"{number} " + "word " * 60] for number in range(20)]]
    results = echo(Sleepy(), workers=2).windows(lines, GREEDY)
    assert next(results)[0] == ["Yes."]
    assert workers_alive()
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 2 and not workers_alive()
