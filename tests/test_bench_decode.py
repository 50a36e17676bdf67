"""The decoding benchmark: its arithmetic, its models, and that its jobs do what they are timed for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ENGLISH, tiny_checkpoint, tiny_tokenizer
from translator.checkpoint import write_checkpoint
from translator.pipeline import Translator

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """Its parts are found beside the script."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from decoding.worker import Worker

    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, tiny_checkpoint())
    return Worker("eager", {"tiny": {"checkpoint": str(folder)}}, threads=1)


def test_ratios_are_of_the_same_round() -> None:
    from decoding.sections import summary

    mine, theirs = (1.0, 12.0, 6.0), (4.0, 8.0, 24.0)  # seconds; other work on the machine came and went
    runs = {
        "mine": [{"wall": wall, "cpu": 1.0, "tokens": 100} for wall in mine],
        "ctranslate2 int8": [{"wall": wall, "cpu": 1.0, "tokens": 200} for wall in theirs],
    }
    found = summary(runs)
    # A token took 0.5, 3 and 0.5 times as long; the medians alone would say 1.5.
    assert found["mine"]["of ctranslate2 int8"] == {"wall": 0.5, "cpu": 2.0}
    assert (found["mine"]["wall_ms"], found["mine"]["wall_ms_least"]) == (60.0, 10.0)
    assert found["mine"]["tokens_a_cpu_second"] == pytest.approx(100)
    assert "of mine" not in found["ctranslate2 int8"]


def test_what_was_found_is_compared_where_both_looked() -> None:
    from decoding.sections import agreement

    assert agreement({"tokens": [1, 2, 3, 4]}, {"tokens": [1, 2, 9, 4]}) == 0.75
    every_line = {"texts": ["a", "b", "c", "d"], "every": 1, "tokens": 9}
    every_second = {"texts": ["x", "c"], "every": 2, "tokens": 4}
    assert agreement(every_second, every_line) == agreement(every_line, every_second) == 0.5
    assert agreement({"wall": 1.0}, {"wall": 1.0}) is None


def test_a_widened_tokenizer_reads_text_as_before() -> None:
    from decoding.models import widened

    wide = widened(tiny_tokenizer(), 1000)
    assert wide.vocab_size == 1000 and wide.eos_id == 3
    for line in ENGLISH:
        assert wide.encode(line) == tiny_tokenizer().encode(line)
    assert wide.pieces([999]) == ["unused00579"]


def test_one_sentence_takes_exactly_as_many_tokens(worker: Any) -> None:
    for beams in (1, 4):
        answer = worker.one("tiny", [270, 300, 3], beams, 17)
        assert len(answer["tokens"]) == 17 and not {0, 2, 3} & set(answer["tokens"])
        assert answer["wall"] > 0 and answer["cpu"] > 0


def test_a_file_is_translated_in_every_layout(worker: Any) -> None:
    wanted = Translator(tiny_checkpoint()).translate(
        ENGLISH, split=False, beam_size=2, max_length_factor=0.0, max_length_extra=12
    )
    layouts = worker.layouts("tiny")["layouts"]
    assert layouts
    for layout in layouts:
        answer = worker.file("tiny", ENGLISH, 2, 12, layout)
        assert answer["texts"] == wanted and answer["tokens"] > len(ENGLISH)


def test_plain_decoders_end_in_the_same_output(worker: Any) -> None:
    outputs = [worker.plain(kind, 3)["output"] for kind in ("uncached", "cached")]
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4)


def test_a_position_adds_the_bytes_of_k_and_v_between(worker: Any) -> None:
    found = worker.positions("tiny", near=2, far=12, steps=2)
    assert found["added_bytes"] == 10 * 2 * 2 * 32 * 4  # tokens, layers, K and V, width, fp32
    assert found["added_ms"] == pytest.approx(found["far_ms"] - found["near_ms"])


def test_a_process_answers_and_one_that_cannot_says_why(tmp_path: Path) -> None:
    from decoding.bench import Bench

    said: list[str] = []
    bench = Bench(["nn.TransformerDecoder"], {"none": {"checkpoint": str(tmp_path)}}, 1, 1, said.append)
    try:
        job = {"job": "one", "model": "none", "ids": [5, 3], "beams": 1, "tokens": 2}
        assert bench.interleaved({"nn.TransformerDecoder": job}) == {}
    finally:
        bench.close()
    assert len(said) == 1 and "config.json is missing" in said[0]
