"""The engine of recorded steps, against the plain one: run as it is, run from a recording, and as CUDA graphs."""

import copy
import gc
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers import VOCABULARY, tiny_checkpoint, tiny_model, tiny_model64
from tests.translator.engine.recording import Recorded, recorded
from tests.translator.test_extensions import Decay, GroupedRotary
from translator.attention import STRUCTURES
from translator.cache import CacheFullError, CacheSpec, FixedStep, Lengths, Step, UnsupportedCacheOperation, View
from translator.config import DecodeConfig
from translator.engine import arena as arena_module
from translator.engine.arena import Arena, power_of_two
from translator.engine.eager import EagerEngine
from translator.engine.graphs import KEPT, GraphDecoding, GraphEngine, as_it_is, cuda_graphs
from translator.model import TranslationModel
from translator.padding import pad, padding
from translator.pipeline import Translator
from translator.search import Driver, Sentence, rows_per_sentence, starter

BLOCK = 8
CUDA = pytest.param(
    "cuda",
    cuda_graphs,
    id="cuda graphs",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
ways = pytest.mark.parametrize(
    ("device", "recorder"),
    [pytest.param("cpu", as_it_is, id="as it is"), pytest.param("cpu", recorded, id="recorded"), CUDA],
)


class Pair:
    """Both engines at the same tokens; every step compares all that scores can be asked."""

    def __init__(self, engine: GraphEngine, model: TranslationModel, lengths: Sequence[int], spec: CacheSpec) -> None:
        self.engines = (EagerEngine(model), engine)
        self.spec = spec
        self.random = torch.Generator().manual_seed(sum(lengths))
        sources = [self._ids(length).tolist() for length in lengths]
        ids, hidden = pad(sources, 0).to(engine.device), padding([len(source) for source in sources]).to(engine.device)
        self.plain, self.graph = (each.start(each.encode(ids, hidden), hidden, spec) for each in self.engines)

    def steps(self, count: int) -> None:
        for _ in range(count):
            tokens = self._ids(self.plain.batch_size * self.plain.beams)
            expected, found = self.plain.step(tokens), self.graph.step(tokens)
            banned = expected.top(1)[1]
            few, many = 2, VOCABULARY // 2
            for mine, theirs in (
                (found.logits(), expected.logits()),
                (found.log_z, expected.log_z),
                (found.at(banned), expected.at(banned)),
                (found.top(3), expected.top(3)),
                (found.top(few, banned), expected.top(few, banned)),
                (found.top(many, banned), expected.top(many, banned)),
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
            assert (found.rows, found.vocab_size) == (expected.rows, VOCABULARY)

    def reorder(self) -> None:
        shape = (self.plain.batch_size, self.plain.beams)
        beam = torch.randint(self.plain.beams, shape, generator=self.random)
        self.plain.reorder(beam)
        self.graph.reorder(beam)

    def compact(self, *keep: int) -> None:
        self.plain.compact(torch.tensor(keep))
        self.graph.compact(torch.tensor(keep))
        assert self.graph.batch_size == len(keep)

    def admit(self, slots: list[int], newcomers: "Pair") -> None:
        self.plain.admit(slots, newcomers.plain)
        self.graph.admit(slots, newcomers.graph)

    def _ids(self, count: int) -> Tensor:
        return torch.randint(4, VOCABULARY, (count,), generator=self.random)


def a_life(engine: GraphEngine, model: TranslationModel) -> Pair:
    """All that can happen to a grid, over several buckets of sentences, target and source tokens."""
    spec = CacheSpec(beams=3)
    pair = Pair(engine, model, [7, 3, 6, 1, 5], spec)
    pair.steps(3)
    pair.reorder()
    pair.steps(7)  # over the first block's end
    pair.compact(4, 1, 2)
    pair.reorder()  # before a step: what was left in the rows beyond the grid must not move
    pair.steps(4)
    begun = Pair(engine, model, [13, 2], spec)  # a longer source than before, which needs another block
    begun.steps(5)
    begun.reorder()
    pair.admit([2, 0], begun)
    pair.reorder()
    pair.steps(1)
    pair.admit([1], Pair(engine, model, [4], spec))
    pair.reorder()
    pair.steps(9)
    pair.compact(2)
    pair.steps(1)
    pair.reorder()
    pair.steps(3)
    return pair


@pytest.mark.numeric
@ways
def test_it_is_the_plain_engine(device, recorder):
    model = copy.deepcopy(tiny_model64()).to(device)
    engine = GraphEngine(model, block=BLOCK, recorder=recorder)
    a_life(engine, model)
    a_life(engine, model)  # in memory that others have used


@pytest.mark.numeric
@ways
@pytest.mark.parametrize(
    "config",
    [DecodeConfig(beam_size=1), DecodeConfig(beam_size=4, n_best=3), DecodeConfig(sampling=True, n_best=2)],
    ids=["greedy", "beam", "sampling"],
)
def test_searches_find_the_same(device, recorder, config):
    """Sentences come and go: more of them than there is room for, of many lengths."""
    model = copy.deepcopy(tiny_model64()).to(device)
    random = torch.Generator().manual_seed(5)
    sources = [torch.randint(4, VOCABULARY, (n,), generator=random).tolist() for n in (3, 17, 5, 1, 9, 12, 2)]

    def found(engine):
        driver = Driver(config, starter(engine, CacheSpec(beams=rows_per_sentence(config))), room=3)
        for source in sources:
            driver.add(Sentence(max_length=5 + len(source), start_id=2, end_id=3, suppressed=(0, 1, 2)), source)
        return [[hypothesis.tokens for hypothesis in each] for _, each in sorted(driver.run().items())]

    assert found(GraphEngine(model, block=BLOCK, recorder=recorder)) == found(EagerEngine(model))


def test_nothing_changes_from_step_to_step_of_a_bucket_but_what_tensors_hold():
    """The same operators on the same shapes, numbers and addresses, and nothing that waits for the host."""
    taken: list[tuple[tuple[int, ...], Recorded]] = []

    def watched(device):
        def record(work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with Recorded() as operators:
                    work()
                taken.append(((id(work), *work.args), operators))

            return run

        return record

    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK, recorder=watched)
    pair = a_life(engine, model)
    arena = pair.graph.arena
    kept = [*engine.model.parameters(), *engine.model.buffers(), *buffers_of(arena)]
    repeated = 0
    for _, runs in itertools.groupby(sorted(taken, key=lambda run: run[0]), key=lambda run: run[0]):
        first, *others = (operators.signature(kept) for _, operators in runs)
        assert first and all(other == first for other in others)
        repeated += len(others)
    assert repeated > 15


def test_a_step_makes_nothing_on_the_host(monkeypatch):
    """On a device that only knows shapes, and refuses tensors of another."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no such device
    with pytest.raises(RuntimeError, match="expected device meta"):
        torch.zeros(1, device="meta") + torch.zeros(1)
    engine = GraphEngine(copy.deepcopy(tiny_model()).to("meta"), torch.bfloat16, block=BLOCK, recorder=as_it_is)
    ids = torch.zeros(3, 7, dtype=torch.int64, device="meta")
    decoding = engine.start(engine.encode(ids), None, CacheSpec(beams=2))
    banned = torch.zeros(6, 2, dtype=torch.int64, device="meta")
    for _ in range(2 * BLOCK):
        values, tokens = decoding.step(torch.zeros(6, dtype=torch.int64)).top(3, banned)
    assert (values.device, tokens.device) == (engine.device, engine.device)
    decoding.reorder(torch.tensor([[1, 0]] * 3))
    decoding.compact(torch.tensor([2, 0]))
    decoding.admit([1], engine.start(engine.encode(ids[:1, :4]), None, CacheSpec(beams=2)))
    scores = decoding.step(tokens[:4, 0])
    assert scores.at(banned[:4]).device == scores.log_z.device == engine.device


def test_tensors_stay_where_they_are_and_recordings_serve_the_next_sentences():
    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK, recorder=recorded)
    pair = Pair(engine, model, [5, 3, 2, 7], CacheSpec(beams=2))
    arena = pair.graph.arena
    before = [buffer.data_ptr() for buffer in buffers_of(arena)]
    pair.steps(2)
    pair.reorder()
    pair.admit([1], Pair(engine, model, [6], CacheSpec(beams=2)))
    pair.steps(1)
    pair.compact(3, 1)
    pair.steps(1)
    mine = [part for state in pair.graph.cache.states for part in (state.k, state.v)]
    mine += [part for source in pair.graph.cache.sources for part in (source.k, source.v)]
    held = [part for state in arena.cache.states for part in (state.k, state.v)]
    held += [part for source in arena.cache.sources for part in (source.k, source.v)]
    assert [part.data_ptr() for part in mine] == [part.data_ptr() for part in held]
    assert [buffer.data_ptr() for buffer in buffers_of(arena)] == before
    buckets = arena.buckets
    assert buckets == 3  # steps of 4 and of 2 sentences, moves of 4
    del pair
    gc.collect()
    later = Pair(engine, model, [1, 2, 3], CacheSpec(beams=2))
    assert later.graph.arena is arena
    later.steps(3)
    later.compact(0, 2)
    later.steps(2)
    assert arena.buckets == buckets


def test_what_others_left_is_not_there_even_if_it_was_nan():
    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK)
    pair = Pair(engine, model, [5, 3], CacheSpec())
    pair.steps(11)
    for state in pair.graph.cache.states:  # as a damaged or overflowing model leaves it
        state.k[:, :, :11] = state.v[:, :, :11] = torch.nan
    newcomers = Pair(engine, model, [4], CacheSpec())
    newcomers.steps(2)
    for state in newcomers.graph.cache.states:
        state.v[:, :, 1] = torch.nan
    admitted = Pair(engine, model, [3], CacheSpec())
    admitted.admit([0], newcomers)  # and no step
    spoilt = admitted.graph.arena
    del admitted, newcomers
    gc.collect()
    newcomers = Pair(engine, model, [4], CacheSpec())
    newcomers.steps(2)
    again = Pair(engine, model, [4], CacheSpec())
    assert spoilt in (newcomers.graph.arena, again.graph.arena)
    again.steps(2)
    pair.compact(0)  # its neighbour computes NaN beside it from now on
    pair.admit([0], newcomers)
    pair.steps(3)
    arena = pair.graph.arena
    del pair, newcomers
    gc.collect()
    after = Pair(engine, model, [2, 6], CacheSpec())
    assert after.graph.arena is arena
    after.steps(12)


def test_the_mask_of_a_recorded_step_is_that_of_any_step():
    lengths = torch.tensor([3, 0, 6])
    recorded_step = FixedStep(lengths.unsqueeze(1), 8, torch.float64, 1, None)
    assert torch.equal(recorded_step.positions, Step(1, Lengths.of(lengths), torch.device("cpu")).positions)
    for window in (None, 2, 4):
        added, is_causal = recorded_step.mask(View(8, window))
        shown, _ = Step(1, Lengths.of(lengths), torch.device("cpu")).mask(View(8, window))
        assert not is_causal and torch.equal(added == 0, shown) and torch.equal(added.isneginf(), ~shown)


def test_rows_beyond_the_grid_see_a_key():
    """Some kernels make NaN of a query that sees none."""
    engine = GraphEngine(tiny_model64(), block=BLOCK)
    memory = engine.encode(torch.full((3, 5), 6))
    decoding = engine.start(memory, None, CacheSpec(sentences=5))
    decoding.step(torch.full((5,), 4))
    assert decoding.arena.room.sentences == 8
    assert bool((decoding.arena.source_mask == 0).any(dim=3).all())


FAULTS = {
    "positions stay after admit": (Arena, "load", lambda original, self, cache: None),
    "positions never advance": (
        Arena,
        "step",
        lambda original, self, cache: (original(self, cache), self.positions.sub_(1)),
    ),
    "mask of self-attention missing": (
        FixedStep,
        "_made",
        lambda original, self, view: (torch.zeros(len(self.slots), 1, 1, view.visible, dtype=self.dtype), False),
    ),
    "mask of the source missing": (
        Arena,
        "load",
        lambda original, self, cache: (original(self, cache), self.source_mask.zero_()),
    ),
    "tokens of the step before": (arena_module, "to_device", lambda original, values, place: None),
    "one bucket for all lengths": (
        arena_module,
        "whole_blocks",
        lambda original, length, block: original(min(length, block), block),
    ),
    "beams stay": (Arena, "move", lambda original, self, cache, parents: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault):
    owner, name, change = FAULTS[fault]
    original = getattr(owner, name)
    model = tiny_model64()
    with (
        mock.patch.object(owner, name, lambda *arguments: change(original, *arguments)),
        pytest.raises((AssertionError, IndexError, RuntimeError)),
    ):
        a_life(GraphEngine(model, block=BLOCK), model)


@pytest.mark.numeric
@pytest.mark.parametrize("recorder", [as_it_is, recorded])
def test_a_structure_of_ones_own_is_recorded_where_it_keeps_keys_and_values(monkeypatch, recorder):
    monkeypatch.setitem(STRUCTURES, "grouped_rotary", GroupedRotary)
    monkeypatch.setitem(STRUCTURES, "decay", Decay)
    model = tiny_model64(attention="grouped_rotary")
    a_life(GraphEngine(model, block=BLOCK, recorder=recorder), model)
    with pytest.raises(UnsupportedCacheOperation, match="'recurrent' cannot keep its addresses"):
        engine = GraphEngine(tiny_model64(attention="decay"))
        engine.start(engine.encode(torch.full((1, 3), 5)), None, CacheSpec())


@ways
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.04), (torch.bfloat16, 0.2)])
def test_half_weights_are_a_copy_and_give_what_a_converted_model_gives(device, recorder, dtype, tolerance):
    model = copy.deepcopy(tiny_model()).to(device)
    ids = torch.randint(4, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1)).to(device)
    half = GraphEngine(model, dtype, block=16, recorder=recorder)  # as a GPU's kernels want masks laid out
    converted = EagerEngine(copy.deepcopy(model).to(dtype))
    assert model.embedding.weight.dtype == torch.float32
    mine, theirs = (each.start(each.encode(ids), None, CacheSpec()) for each in (half, converted))
    for token in range(10):
        found, expected = (each.step(torch.tensor([7 + token, 9])) for each in (mine, theirs))
        assert found.logits().dtype == torch.float32
        torch.testing.assert_close(found.logits(), expected.logits().float(), rtol=0, atol=tolerance)


def test_a_model_trained_on_since_is_noticed():
    model = copy.deepcopy(tiny_model64())
    engine, ids = GraphEngine(model), torch.full((1, 3), 5)
    engine.encode(ids)
    model.decoder.layers[0].linear1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights have changed since the engine was made"):
        engine.encode(ids)


def test_weights_are_in_memory_once_and_stay_when_the_model_is_converted():
    model = copy.deepcopy(tiny_model64())
    engine, ids = GraphEngine(model), torch.full((1, 3), 5)
    assert [w.data_ptr() for w in engine.model.parameters()] == [w.data_ptr() for w in model.parameters()]
    before = engine.encode(ids)
    model.train().float()
    assert torch.equal(engine.encode(ids), before)
    half = GraphEngine(model, torch.bfloat16)
    assert {w.dtype for w in half.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in model.parameters()} == {torch.float32}


def test_decodings_of_several_threads_have_memory_of_their_own():
    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK)
    failed: list[BaseException] = []

    def live() -> None:
        try:
            a_life(engine, model)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=live) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    gc.collect()
    assert 1 <= len(engine._free) <= KEPT


def test_a_cuda_graph_is_recorded_aside_after_one_run_and_alone(monkeypatch):
    """What `cuda_graphs` asks of PyTorch, in order, where there is no GPU to do it."""
    told: list[str] = []
    signature = inspect.signature(torch.cuda.graph.__init__)
    at_once = []

    class Stream:
        def __init__(self, name: object = "here") -> None:
            self.name = str(name)

        def wait_stream(self, other: "Stream") -> None:
            told.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def in_stream(stream: Stream) -> Iterator[None]:
        told.append(f"in {stream.name}")
        yield

    @contextmanager
    def recording(graph: object, **options: object) -> Iterator[None]:
        signature.bind(None, graph, **options)
        at_once.append(1)
        assert sum(at_once) == 1
        told.append(f"record in {options['stream'].name}, {options['pool']}, {options['capture_error_mode']}")
        yield
        time.sleep(0.02)
        at_once.append(-1)

    for name, fake in {
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "current_stream": Stream,
        "stream": in_stream,
        "device": lambda device: nullcontext(),
        "CUDAGraph": lambda: mock.Mock(replay=lambda: told.append("replay")),
        "graph": recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    record = cuda_graphs(torch.device("cuda:1"))
    record(lambda: told.append("work"))()
    assert told == [
        "cuda:1 waits for here",
        "in cuda:1",
        "work",
        "here waits for cuda:1",
        "record in cuda:1, pool, thread_local",
        "work",
        "replay",
    ]
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(record, [lambda: None] * 8))) == 8


def test_mistakes_are_named_before_anything_changes():
    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK)
    memory = engine.encode(torch.full((2, 5), 6))
    decoding = engine.start(memory, None, CacheSpec(capacity=3))
    with pytest.raises(ValueError, match=r"a step of 2 rows needs as many tokens, not \(1,\)"):
        decoding.step(torch.tensor([4]))
    for _ in range(3):
        decoding.step(torch.tensor([4, 5]))
    with pytest.raises(CacheFullError, match="4 slots are needed and capacity is 3"):
        decoding.step(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match="reorder indices must lie within a sentence"):
        decoding.reorder(torch.tensor([[1], [0]]))
    short = CacheSpec(source_capacity=BLOCK)
    with pytest.raises(ValueError, match="a source of 9 tokens doesn't fit a grid with room for 8"):
        engine.start(engine.encode(torch.full((1, 9), 6)), None, short)
    with pytest.raises(ValueError, match="a source of 9 tokens doesn't fit a grid with room for 8"):
        engine.start(memory, None, short).admit(
            [0], engine.start(engine.encode(torch.full((1, 9), 6)), None, CacheSpec())
        )
    whole = engine.start(memory, None, CacheSpec())
    for _ in range(engine.max_positions):
        whole.step(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match="target of 97 tokens is longer than max_positions 96"):
        whole.step(torch.tensor([4, 5]))


def test_buckets_of_sentences_are_powers_of_two():
    assert [power_of_two(count) for count in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


@pytest.mark.numeric
def test_a_translator_runs_on_it():
    model = tiny_model64()
    lines = ["The cat sat on the mat.", "", "Where is the station? It is over there.", "Yes."]
    plain = Translator(tiny_checkpoint(model=model))
    graphs = Translator(tiny_checkpoint(model=model), engine=GraphEngine(model, block=BLOCK, recorder=recorded))
    for beams in (1, 3):
        assert graphs.translate(lines, beam_size=beams) == plain.translate(lines, beam_size=beams)


def buffers_of(arena: Arena) -> list[Tensor]:
    own = [arena.tokens, arena.positions, arena.parents, arena.source_mask]
    own += [arena.logits, arena.log_z, arena.best, arena.best_ids]
    kept = [part for state in arena.cache.states for part in (state.k, state.v)]
    return own + kept + [part for source in arena.cache.sources for part in (source.k, source.v)]


def test_decodings_hold_their_arena_while_scores_of_them_live():
    model = tiny_model64()
    engine = GraphEngine(model, block=BLOCK)
    decoding = engine.start(engine.encode(torch.full((1, 5), 6)), None, CacheSpec())
    assert isinstance(decoding, GraphDecoding)
    arena, scores = decoding.arena, decoding.step(torch.tensor([4]))
    del decoding
    gc.collect()
    assert engine.start(engine.encode(torch.full((1, 5), 6)), None, CacheSpec()).arena is not arena
    assert arena not in engine._free
    del scores
    gc.collect()
    assert arena in engine._free
