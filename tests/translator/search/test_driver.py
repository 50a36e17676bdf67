"""The driver: sentences that come, go and are called off get what they get alone, and events add up."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.helpers import tiny_model64
from tests.translator.search.models import (
    BEAM,
    BOS,
    EOS,
    GREEDY,
    NEVER,
    PAD,
    SAMPLING,
    A,
    StubDecoding,
    Table,
    assert_same,
    every_search,
    random_table,
    run,
    sentences,
)
from translator.cache import CACHE_KINDS, CacheSpec
from translator.config import DecodeConfig
from translator.engine.eager import EagerEngine
from translator.errors import UserError
from translator.search import (
    POLICIES,
    Choice,
    Driver,
    Event,
    Hypothesis,
    Policy,
    Sentence,
    each_by_itself,
    policy_of,
    register,
    rows_per_sentence,
    search,
    starter,
)

pytestmark = pytest.mark.numeric


class StubStarts:
    """Starts decodings of a table; a source is the sentence's number in it. Keeps what it started."""

    def __init__(self, table: Table, beams: int) -> None:
        self.table = table
        self.beams = beams
        self.started: list[tuple[list[int], int | None]] = []

    def __call__(self, sources: Sequence[Sequence[int]], slots: int | None) -> StubDecoding:
        numbers = [number for (number,) in sources]
        self.started.append((numbers, slots))
        return StubDecoding(self.table, numbers, self.beams, slots or 0)


def stub_driver(table: Table, config: DecodeConfig, **options) -> Driver:
    return Driver(config, StubStarts(table, rows_per_sentence(config)), **options)


def results_of(events: list[Event]) -> dict[int, list[Hypothesis]]:
    return {event.number: event.result for event in events if event.result is not None}


# -- sentences that come and go ----------------------------------------------------------------------------------------


@every_search
@pytest.mark.parametrize("room", [1, 2, 3, 100])
@pytest.mark.parametrize("seed", range(4))
def test_sentences_that_come_at_any_time_get_what_they_get_alone(config, room, seed):
    """In free slots, in a grid that has to grow, in one that has become empty; each with settings of its own."""
    table, generator = random_table(seed, spread=1.0), random.Random(seed)
    config = replace(config, early_stopping=bool(seed % 2))
    asked: list[Sentence] = []
    for number in range(14):
        own = replace(
            config,
            length_penalty=generator.choice([0.0, 1.0]),
            no_repeat_ngram_size=generator.choice([0, 0, 1, 2]),
            temperature=generator.choice([0.5, 2.0]),
            top_k=generator.choice([0, 0, 2]) if config.sampling else 0,
            top_p=generator.choice([1.0, 0.8]) if config.sampling else 1.0,
        )
        prefix = tuple(generator.choices([A, A + 1, A + 2], k=generator.choice([0, 0, 3])))
        asked += sentences([generator.randint(1, 9)], prefixes=[prefix], config=own, keys=[(number,)])
    driver = stub_driver(table, config, room=room)
    events, running, waiting = [], [], list(range(14))
    while waiting or driver.busy:
        for _ in range(generator.choice([0, 0, 1, 2, 5])):
            if waiting:
                number = waiting.pop(0)
                assert driver.add(asked[number], [number]) == number
        stepped = driver.step()
        running.append(len(stepped))
        events += stepped
    found = results_of(events)
    assert max(running) <= room and (room == 1 or max(running) > 1)
    for number, sentence in enumerate(asked):
        alone = StubDecoding(lambda _, held, s=number: table(s, held), 1, rows_per_sentence(config))
        assert_same(found[number], search(alone, [sentence], config)[0])
    assert driver.step() == []


def test_newcomers_take_free_slots_and_a_grid_grows_only_when_it_must():
    starts = StubStarts(random_table(1, never_ends=True), 1)
    driver = Driver(GREEDY, starts, room=3)
    for number, most in enumerate([2, 4, 4, 6, 3]):
        driver.add(*sentences([most]), [number])
    driver.run()
    assert starts.started == [([0, 1, 2], None), ([3], None), ([4], None)], "into slots that became free"
    driver.add(*sentences([9]), [0])
    driver.step()
    driver.add(*sentences([9]), [1])
    driver.step()
    assert starts.started[3:] == [([0], None), ([1], 2)], "one more than there were slots"


@every_search
def test_a_sentence_called_off_changes_nothing_for_the_others(config):
    table, limits = random_table(7, spread=1.0, never_ends=True), [6, 9, 5, 9, 3]
    expected = run(table, config, limits)
    driver = stub_driver(table, config, room=4)
    for number, sentence in enumerate(sentences(limits)):
        driver.add(sentence, [number])
    driver.cancel(4)  # it waits
    events = driver.step() + driver.step()
    driver.cancel(1)  # it runs
    driver.cancel(1)
    driver.cancel(77)  # nobody
    while driver.busy:
        stepped = driver.step()
        assert all(event.number not in (1, 4) for event in stepped)
        events += stepped
    found = results_of(events)
    assert sorted(found) == [0, 2, 3]
    for number, hypotheses in found.items():
        assert_same(hypotheses, expected[number])


def test_a_start_that_fails_loses_no_sentence():
    table = random_table(0)
    starts = StubStarts(table, 1)
    lengths = [5, 3, 7]
    expected = run(table, GREEDY, lengths)
    fails = [True]

    def start(sources, slots):
        if fails:
            fails.clear()
            raise RuntimeError("no memory for these")
        return starts(sources, slots)

    driver = Driver(GREEDY, start)
    for number, sentence in enumerate(sentences(lengths)):
        driver.add(sentence, [number])
    with pytest.raises(RuntimeError, match="no memory"):
        driver.step()
    assert driver.busy
    results = driver.run()
    assert len(results) == len(lengths)
    for number, wanted in enumerate(expected):
        assert_same(results[number], wanted)


def test_a_driver_whose_sentences_are_all_called_off_is_idle():
    driver = stub_driver(random_table(1), GREEDY)
    driver.add(*sentences([5]), [0])
    driver.step()
    driver.cancel(0)
    assert not driver.busy and driver.step() == []


@every_search
def test_events_add_up_to_the_hypotheses(config):
    table, limits = random_table(7, spread=1.0), [6, 9, 1, 9, 3]
    config = replace(config, early_stopping=False)
    driver = stub_driver(table, config, room=2)
    for number, sentence in enumerate(sentences(limits)):
        driver.add(sentence, [number])
    rows: dict[int, list[list[int]]] = {}
    ended: dict[int, list[Hypothesis]] = {}
    finished: dict[int, list[Hypothesis]] = {}
    while driver.busy:
        for event in driver.step():
            before = rows.get(event.number, [[]] * driver.rows)
            now = [[] if row is None else [*before[row.parent], row.token] for row in event.rows]
            for hypothesis in event.ended:
                if hypothesis.finished:
                    assert hypothesis.tokens[:-1] in before and hypothesis.tokens[-1] == EOS
                else:
                    assert hypothesis.tokens in now
            assert event.number not in finished
            rows[event.number] = now
            ended[event.number] = ended.get(event.number, []) + event.ended
            if event.result is not None:
                finished[event.number] = event.result
    assert sorted(finished) == list(range(5))
    for number, result in finished.items():
        assert result and all(hypothesis in ended[number] for hypothesis in result)


def test_a_greedy_stream_shows_each_token_as_it_comes():
    table = random_table(12)
    expected = run(table, GREEDY, [6])[0][0].tokens
    driver = stub_driver(table, GREEDY)
    driver.add(*sentences([6]), [0])
    seen = []
    while driver.busy:
        (event,) = driver.step()
        seen += [row.token for row in event.rows if row]
    assert seen == [token for token in expected if token != EOS]
    assert event.result is not None and event.result[0].tokens == expected


# -- what belongs to a sentence ----------------------------------------------------------------------------------------


@every_search
def test_a_start_token_that_is_the_end_token_may_end_a_target(config):
    """As in Marian's models and fairseq's: not suppressed, though a target begins with it."""
    table, fed = random_table(3), []

    class Recorded(StubDecoding):
        def step(self, tokens: torch.Tensor):
            fed.append(tokens.tolist())
            return super().step(tokens)

    settings = {"start_id": EOS, "end_id": EOS, "suppressed": (PAD, BOS)}
    found = search(Recorded(table, 3, rows_per_sentence(config)), sentences([8, 5, 8], **settings), config)
    assert set(fed[0]) == {EOS}
    assert any(hypothesis.finished for hypotheses in found for hypothesis in hypotheses)
    for mine, theirs in zip(found, run(table, config, [8, 5, 8]), strict=True):
        assert_same(mine, theirs)


@every_search
def test_what_is_suppressed_is_a_sentences_own(config):
    limits = [6, 6, 6]
    together = sentences(limits, suppressed=(PAD, BOS))
    together[1] = replace(together[1], suppressed=(PAD, BOS, A, A + 1))
    table = random_table(3, spread=0.5)
    found = search(StubDecoding(table, 3, rows_per_sentence(config)), together, config)
    assert all({A, A + 1}.isdisjoint(hypothesis.tokens) for hypothesis in found[1])
    assert any(A in hypothesis.tokens for hypothesis in found[0] + found[2])


def test_a_sentence_of_another_search_is_refused():
    driver = stub_driver(random_table(1), BEAM)
    for config in (GREEDY, SAMPLING, replace(BEAM, beam_size=4)):
        with pytest.raises(ValueError, match="rows"):
            driver.add(*sentences([5], config=config), [0])


def test_only_an_idle_driver_takes_over_a_decoding_and_only_one_that_fits():
    driver = stub_driver(random_table(1), GREEDY)
    with pytest.raises(ValueError, match="2 sentences of 1 rows"):
        driver.adopt(StubDecoding(random_table(1), 3), sentences([5, 5]))
    driver.adopt(StubDecoding(random_table(1), 2), sentences([5, 5]))
    with pytest.raises(ValueError, match="other sentences are being decoded"):
        driver.adopt(StubDecoding(random_table(1), 2), sentences([5, 5]))
    with pytest.raises(ValueError, match="starter"):
        Driver(GREEDY).add(*sentences([5]), [0])


@every_search
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(config, bad):
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [0.0, 0.0, -2.0, bad if len(held) == 2 else 1.0, 0.5, 0.0]

    with pytest.raises(UserError, match="NaN instead of probabilities"):
        run(table, config, [8, 8])
    with pytest.raises(UserError, match="NaN instead of probabilities"):
        run(lambda *_: [NEVER] * 6, config, [8, 8])


@every_search
def test_a_prefix_that_is_impossible_still_gives_a_target(config):
    def table(sentence: int, held: tuple[int, ...]) -> list[float]:
        return [0.0, 0.0, 0.0, NEVER, 0.5, 0.0]

    for found in run(table, config, [4, 4], prefixes=[[A], [A + 1]]):
        assert found and found[0].tokens


# -- a search of one's own ---------------------------------------------------------------------------------------------


def test_a_search_of_ones_own_is_one_class():
    """Takes the second best wherever there is one."""

    @register
    class Second(Policy):
        name = "second"

        @classmethod
        def rows(cls, config: DecodeConfig) -> int:
            return 1

        def choose(self, scores, grid, banned, forced) -> Choice:
            values, ids = scores.top(2, banned)
            return each_by_itself(grid, ids[:, 1], values[:, 1])

    try:
        config = DecodeConfig(search="second")
        table = random_table(4)
        for sentence, (found,) in enumerate(run(table, config, [6, 3])):
            for t, token in enumerate(found.tokens):
                allowed = [NEVER, NEVER, *table(sentence, tuple(found.tokens[:t]))[2:]]
                assert token == sorted(range(6), key=lambda place: -allowed[place])[1]
    finally:
        del POLICIES["second"]
    with pytest.raises(UserError, match="unknown search 'second'; known: beam, greedy, sampling"):
        policy_of(config)


# -- with a cache ------------------------------------------------------------------------------------------------------

SOURCES = [[21, 3], [300, 301, 302, 288, 270, 3], [*range(262, 300), 3], [400, 410, 3], [3], [77, 8, 9, 3]]
LIMITS = [14, 22, 40, 16, 12, 20]
CONFIGS = {
    "greedy": DecodeConfig(beam_size=1),
    "beam 4": DecodeConfig(beam_size=4, n_best=4, early_stopping=False, length_penalty=0.6),
    "sampling": DecodeConfig(sampling=True, n_best=3),
    "no repeats": DecodeConfig(beam_size=3, n_best=3, no_repeat_ngram_size=2),
}


def of_model(index: int) -> Sentence:
    prefix = [300, 21] if index == 3 else []
    return Sentence(max_length=LIMITS[index], start_id=2, end_id=3, suppressed=(0, 2), key=(index,), prefix=prefix)


@pytest.mark.parametrize("kind", sorted(CACHE_KINDS))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_with_a_cache_too_a_sentence_may_come_while_others_are_decoded(config, kind):
    """Rows of different lengths side by side, sources longer and shorter than those they replace."""
    engine = EagerEngine(tiny_model64())
    start = starter(engine, CacheSpec(kind=kind, capacity=64, beams=rows_per_sentence(config)))
    driver, events = Driver(config, start, room=3), []
    lengths = []
    for index in (4, 1, 0, 3, 5, 2):  # the longest source last
        driver.add(of_model(index), SOURCES[index])
        for _ in range(4):
            events += driver.step()
            lengths.append(len(set(driver._grid.lengths.tolist())))
    while driver.busy:
        events += driver.step()
    found = results_of(events)
    assert max(lengths) == 3
    for number, index in enumerate((4, 1, 0, 3, 5, 2)):
        (alone,) = search(start([SOURCES[index]], None), [of_model(index)], config)
        assert_same(found[number], alone)
