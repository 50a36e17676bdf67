"""The cache contract, for every kind: a step with a cache is the full causal pass of `nn.TransformerDecoder`.

The oracle is PyTorch's own stack, each row alone with its own unpadded source, so that a fault in the
uncached path here can't hide one in the cached path.
"""

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from translator import CachedDecoder
from translator.cache import (
    CACHE_KINDS,
    CacheFullError,
    CacheSpec,
    DecoderCache,
    DynamicCache,
    KeyValueState,
    SourceState,
    Step,
    UnsupportedCacheOperation,
    View,
)

pytestmark = pytest.mark.numeric
D, H, FF, LAYERS, VOCABULARY, LONGEST = 16, 2, 24, 2, 13, 96
CAPACITY, BLOCK = 64, 1
FP64 = torch.float64
KINDS = sorted(CACHE_KINDS)
TOLERANCE = 1e-10
every_kind = pytest.mark.parametrize("kind", KINDS)


class Model:
    """A decoder with an embedding of its own, and PyTorch's stack with the same weights beside it."""

    def __init__(self, *, norm: bool = True, batch_first: bool = True, norm_first: bool = True) -> None:
        layer = nn.TransformerDecoderLayer(
            D, H, FF, dropout=0.0, norm_first=norm_first, batch_first=batch_first, dtype=FP64
        )
        self.original = nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(D, dtype=FP64) if norm else None).eval()
        self.generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.original.parameters():
                parameter.normal_(std=0.3, generator=self.generator)
        self.tokens, self.places = self.random(VOCABULARY, D), self.random(LONGEST, D)
        self.decoder = CachedDecoder.from_torch(self.original)
        self.batch_first = batch_first

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=FP64)

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(VOCABULARY, shape, generator=self.generator)

    def sources(self, *lengths: int) -> list[Tensor]:
        return [self.random(length, D) for length in lengths]

    def layout(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.layout(self.tokens[ids] + self.places[positions])

    @torch.no_grad()
    def oracle(self, ids: Tensor, source: Tensor) -> Tensor:
        """Hidden states `(T, D)` of one row's ids `(T,)` with its source `(S, D)`."""
        T = len(ids)
        tgt, memory = self.embed(ids[None], torch.arange(T)[None]), self.layout(source[None])
        output = self.original(tgt, memory, tgt_mask=torch.ones(T, T).triu(1) != 0)
        return self.layout(output)[0]

    def start(self, sources: list[Tensor], kind: str, **options) -> DecoderCache:
        """A cache for sources of any lengths: garbage where one is padded."""
        longest = max(map(len, sources))
        memory = torch.full((len(sources), longest, D), 77.0, dtype=FP64)
        padding = torch.ones(len(sources), longest, dtype=torch.bool)
        for row, source in enumerate(sources):
            memory[row, : len(source)] = source
            padding[row, : len(source)] = False
        options = {"capacity": CAPACITY, "block": BLOCK, **options}
        return self.decoder.start(self.layout(memory), padding if padding.any() else None, kind=kind, **options)

    def step(self, ids: Tensor, cache: DecoderCache, **masks: Tensor) -> Tensor:
        """Hidden states `(rows, T, D)` of the next ids `(rows, T)`."""
        return self.layout(self.decoder(self.embed(ids, cache.positions(ids.shape[1])), cache, **masks))


class Grid:
    """A cache beside a plain record of what each row has decoded; every step is checked."""

    def __init__(self, model: Model, lengths: list[int], kind: str, **options) -> None:
        self.model, self.kind = model, kind
        self.sources = model.sources(*lengths)
        self.cache = model.start(self.sources, kind, **options)
        self.history = [torch.zeros(0, dtype=torch.int64) for _ in range(self.cache.rows)]

    def check(self) -> None:
        assert self.cache.lengths.tolist() == [len(history) for history in self.history]
        assert self.cache.rows == len(self.history)
        assert_zero_beyond_lengths(self.cache)

    def step(self, T: int = 1, ids: Tensor | None = None, **masks: Tensor) -> Tensor:
        ids = self.model.ids(self.cache.rows, T) if ids is None else ids
        output = self.model.step(ids, self.cache, **masks)
        for row, history in enumerate(self.history):
            self.history[row] = torch.cat([history, ids[row]])
            expected = self.model.oracle(self.history[row], self.sources[row // self.cache.beams])[-ids.shape[1] :]
            assert_close(output[row], expected)
        self.check()
        return output

    def expand(self, beams: int) -> None:
        self.cache.expand(beams)
        self.history = [history for history in self.history for _ in range(beams)]
        self.check()

    def reorder(self, beam: list[list[int]]) -> None:
        self.cache.reorder(torch.tensor(beam))
        K = self.cache.beams
        self.history = [self.history[b * K + k] for b, row in enumerate(beam) for k in row]
        self.check()

    def compact(self, keep: list[int], as_mask: bool = False) -> None:
        chosen = torch.tensor(keep, dtype=torch.int64)
        K, B = self.cache.beams, self.cache.batch_size
        self.cache.compact(torch.isin(torch.arange(B), chosen) if as_mask else chosen)
        self.history = [self.history[b * K + k] for b in keep for k in range(K)]
        self.sources = [self.sources[b] for b in keep]
        self.check()

    def admit(self, slot: int, other: "Grid") -> None:
        self.cache.admit(slot, other.cache)
        K = self.cache.beams
        self.history[slot * K : (slot + 1) * K] = other.history * (K // other.cache.beams)
        self.sources[slot] = other.sources[0]
        self.check()

    def crop(self, lengths: int | list[int]) -> None:
        self.cache.crop(lengths if isinstance(lengths, int) else torch.tensor(lengths))
        each = [lengths] * self.cache.rows if isinstance(lengths, int) else lengths
        self.history = [history[:n] for history, n in zip(self.history, each, strict=True)]
        self.check()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= TOLERANCE


def assert_zero_beyond_lengths(cache: DecoderCache) -> None:
    for state in cache.states:
        if state.by_reference:
            continue  # what lies beyond a row's length may be another row's: `shown` hides it
        for buffer in (state.k, state.v):
            assert buffer.shape[0] == cache.rows
            for row, length in enumerate(cache.lengths.tolist()):
                beyond = buffer[row, :, length : state.clean]  # further slots were in no view yet
                assert not beyond.isnan().any() and not beyond.any()
                assert buffer[row, :, :length].abs().sum(-1).min() > 0 if length else True


def table_bytes(cache: DecoderCache) -> int:
    """Of the table that rows are entries of, which every layer has in common."""
    return sum({id(s.table): s.table.nbytes for s in cache.states if s.by_reference}.values())


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(params=[1, 64], ids=["block 1", "block 64"])
def block(request, monkeypatch) -> Iterator[int]:
    """Runs a test with views of that block."""
    monkeypatch.setitem(globals(), "BLOCK", request.param)
    return request.param


# -- steps ----------


@every_kind
@pytest.mark.parametrize("sizes", [[1] * 12, [1, 4, 3, 1, 2], [8], [3, 8, 1], [40]], ids=str)
@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 1, 3], [6]], ids=str)
def test_steps_of_any_size_equal_the_full_causal_pass(model, kind, sizes, lengths, block):
    grid = Grid(model, lengths, kind)
    for size in sizes:
        grid.step(size)


@every_kind
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_steps_for_every_shape_of_stack(kind, norm, batch_first, norm_first):
    grid = Grid(Model(norm=norm, batch_first=batch_first, norm_first=norm_first), [3, 5], kind)
    for size in (1, 2, 1):
        grid.step(size)


@every_kind
@pytest.mark.parametrize("past", [0, 3])
def test_a_token_does_not_see_the_next_in_its_step(model, kind, past, block):
    ids = model.ids(1, past + 4)
    outputs = []
    for change in range(2):
        changed = ids.clone()
        changed[0, past + 2 :] = (changed[0, past + 2 :] + change) % VOCABULARY
        cache = model.start([torch.ones(3, D, dtype=FP64)], kind)
        if past:
            model.step(changed[:, :past], cache)
        outputs.append(model.step(changed[:, past:], cache))
    assert_close(outputs[0][:, :2], outputs[1][:, :2])
    assert (outputs[0][:, 2:] - outputs[1][:, 2:]).abs().amax(dim=2).min() > 1e-3


@every_kind
@pytest.mark.parametrize(("source", "target"), [(50, 5), (5, 50)])
def test_source_and_target_lengths_are_unrelated(model, kind, source, target):
    grid = Grid(model, [source, source - 2], kind, capacity=target)
    for size in [2] + [1] * 2 + [target - 4]:
        grid.step(size)
    changed = [part.clone() for part in grid.sources]
    changed[0][-1] = model.random(D)
    cache, ids = model.start(changed, kind, capacity=target), torch.stack(grid.history)
    outputs = model.step(ids, cache)
    expected = model.oracle(ids[0], grid.sources[0])
    assert (outputs[0, -1] - expected[-1]).abs().max() > 1e-4, "the last source token must count"


@every_kind
def test_positions_come_from_the_lengths(model, kind):
    grid = Grid(model, [3, 3], kind)
    for size in (1, 3, 1):
        past = grid.cache.length
        assert grid.cache.positions(size).tolist() == [list(range(past, past + size))] * 2
        assert grid.cache.positions(size).dtype == torch.int64
        grid.step(size)
    grid.crop([2, 4])
    assert grid.cache.positions(2).tolist() == [[2, 3], [4, 5]]
    grid.expand(2)
    assert grid.cache.positions(1).tolist() == [[2], [2], [4], [4]]


@every_kind
@pytest.mark.parametrize("sizes", [[1] * 10, [4, 1, 3, 2]], ids=str)
@pytest.mark.parametrize("as_float", [False, True])
def test_an_all_valid_mask_is_no_mask(model, kind, sizes, as_float):
    grid = Grid(model, [3, 5], kind)
    dtype = FP64 if as_float else torch.bool
    for size in sizes:
        total = grid.cache.length + size
        grid.step(
            size,
            tgt_mask=torch.zeros(size, total, dtype=dtype),
            tgt_key_padding_mask=torch.zeros(2, total, dtype=dtype),
        )


@every_kind
@pytest.mark.parametrize("sizes", [[4, 1, 3], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("as_float", [False, True])
def test_a_callers_masks_hide_in_steps_as_in_the_full_pass(model, kind, sizes, as_float):
    """Padding alone, also in a first step of several tokens, where it has to be joined with causality."""
    T, source = sum(sizes), model.random(2, 3, D)
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, 1] = padding[1, 2] = True
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[3:, 0] = True
    if as_float:
        padding, mask = (torch.zeros(m.shape, dtype=FP64).masked_fill(m, float("-inf")) for m in (padding, mask))
    ids = model.ids(2, T)
    tgt = model.embed(ids, torch.arange(T)[None])
    causal = torch.ones(T, T).triu(1) != 0
    for use_mask, use_padding in itertools.product([True, False], repeat=2):
        together = (causal | (mask != 0)) if use_mask else causal
        expected = model.original(
            tgt, source, tgt_mask=together, tgt_key_padding_mask=(padding != 0) if use_padding else None
        )
        cache, done = model.start(list(source), kind), 0
        for size in sizes:
            end = done + size
            masks = {"tgt_mask": mask[done:end, :end]} if use_mask else {}
            if use_padding:
                masks["tgt_key_padding_mask"] = padding[:, :end]
            assert_close(model.step(ids[:, done:end], cache, **masks), expected[:, done:end])
            done = end


@every_kind
@pytest.mark.parametrize("name", ["tgt_mask", "tgt_key_padding_mask"])
@pytest.mark.parametrize("keys", [1, 2, 5, 6, 8])
def test_a_mask_of_the_wrong_length_names_past_and_step(model, kind, name, keys):
    grid = Grid(model, [3, 3], kind)
    grid.step(5)
    shape = (2, keys)
    with pytest.raises(ValueError, match=r"past \+ step = 5 \+ 2 = 7"):
        grid.step(2, **{name: torch.zeros(shape, dtype=torch.bool)})
    grid.step(2)


@every_kind
def test_refused_steps_change_nothing(model, kind):
    grid = Grid(model, [3, 3], kind)
    grid.step(2)
    for ids, message in (
        (model.ids(1, 1), "1 rows"),
        (model.ids(4, 1), "4 rows"),
        (model.ids(2, 0), "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            model.decoder(model.tokens[ids], grid.cache)
    with pytest.raises(ValueError, match="start"):
        grid.step(1, memory_key_padding_mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(RuntimeError):  # another width
        model.decoder(model.tokens[model.ids(2, 1)][..., :4], grid.cache)
    with pytest.raises(ValueError, match="layers"):
        CachedDecoder([*model.decoder.layers, model.decoder.layers[0]])(model.tokens[model.ids(2, 1)], grid.cache)
    grid.step(1)


@every_kind
def test_an_unbatched_step(model, kind):
    source, ids = model.sources(4)[0], model.ids(3)
    cache = model.decoder.start(source, torch.zeros(4, dtype=torch.bool), kind=kind, capacity=8)
    outputs = [
        model.decoder(
            model.embed(ids[i], torch.tensor(i)).reshape(1, D),
            cache,
            tgt_key_padding_mask=torch.zeros(i + 1, dtype=torch.bool),
        )
        for i in range(3)
    ]
    assert_close(torch.cat(outputs), model.oracle(ids, source))


@every_kind
@pytest.mark.parametrize("norm_first", [True, False])
def test_no_gradient_flows_through_a_step(kind, norm_first):
    model = Model(norm_first=norm_first)
    source = model.random(1, 3, D).requires_grad_()
    cache = model.decoder.start(source, kind=kind, capacity=4)
    output = model.decoder(model.random(1, 2, D).requires_grad_(), cache)
    assert not output.requires_grad
    state, source = cache.states[0], cache.sources[0]
    assert not any(part.requires_grad for part in (state.k, state.v, source.k))


@every_kind
@pytest.mark.parametrize(
    "make_active",
    [
        lambda decoder: decoder.train(),
        lambda decoder: decoder.layers[1].train(),
        lambda decoder: decoder.layers[0].dropout2.train(),
        lambda decoder: decoder.layers[1].multihead_attn.train(),
    ],
)
def test_a_step_under_active_dropout_is_refused(kind, make_active):
    layer = nn.TransformerDecoderLayer(D, H, FF, dropout=0.5, batch_first=True)
    original = nn.TransformerDecoder(layer, LAYERS).eval()
    decoder = CachedDecoder.from_torch(original)
    cache = decoder.start(torch.randn(1, 3, D), kind=kind, capacity=4)
    token = torch.randn(1, 1, D)
    expected = decoder(token, cache)
    make_active(decoder)
    with pytest.raises(RuntimeError, match=r"layers\.[01]: .* active dropout .* eval\(\)"):
        decoder(token, cache)
    assert cache.length == 1
    decoder.eval()
    cache.reset()
    original.train()  # the original's mode is its own
    torch.testing.assert_close(decoder(token, cache), expected, rtol=0, atol=1e-5)


def test_training_mode_without_dropout_may_step(model):
    model.decoder.train()
    assert model.decoder(model.random(1, 1, D), model.decoder.start(model.random(1, 3, D))).shape == (1, 1, D)
    model.decoder.eval()


@every_kind
def test_a_cache_of_another_type_names_both_and_says_what_to_do(kind):
    decoder = Model().decoder.float()
    source, token = torch.randn(1, 3, D), torch.randn(1, 1, D)
    with torch.autocast("cpu", torch.bfloat16):
        halved = decoder.start(source, kind=kind, capacity=4)
        assert decoder(token, halved).shape == token.shape
    message = r"cache holds bfloat16 on cpu, the decoder is now float32 on cpu: call start\(\) again, or .*cache\.to"
    with pytest.raises(RuntimeError, match=message):
        decoder(token, halved)
    assert halved.length == 1
    full = decoder.start(source, kind=kind, capacity=4)
    decoder(token, full)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"cache holds float32 .* now bfloat16"),
    ):
        decoder(token, full)
    decoder.double()
    with pytest.raises(RuntimeError, match="cache holds float32 on cpu, the decoder is now float64 on cpu"):
        decoder(token.double(), full)


@every_kind
def test_a_cache_moves_to_another_type_with_all_it_holds(kind):
    decoder = Model().decoder
    source, tokens = torch.randn(2, 3, D, dtype=FP64), torch.randn(2, 5, D, dtype=FP64)
    hidden = torch.tensor([[False, False, True], [False, False, False]])
    whole = decoder(tokens, decoder.start(source, hidden, kind=kind, capacity=8))
    cache = decoder.start(source, hidden, kind=kind, capacity=8)
    decoder(tokens[:, :3], cache)
    cache.begin(1)  # left open: forgotten by the move
    decoder.float()
    assert cache.to(dtype=torch.float32) is cache and cache.dtype == torch.float32 and cache.length == 3
    assert torch.allclose(decoder(tokens[:, 3:].float(), cache).double(), whole[:, 3:], atol=1e-4)


@every_kind
def test_keys_and_values_may_be_kept_in_another_type(kind):
    decoder = Model().decoder.float()
    source, tokens = torch.randn(2, 3, D), torch.randn(2, 6, D)
    expected = decoder(tokens, source, tgt_is_causal=True)
    cache = decoder.start(source, kind=kind, capacity=8, dtype=torch.float64)
    assert cache.dtype == torch.float64 and cache.states[0].k.dtype == torch.float64
    steps = [decoder(part, cache) for part in tokens.split([1, 4, 1], dim=1)]
    assert steps[0].dtype == torch.float32
    assert torch.allclose(torch.cat(steps, dim=1), expected, atol=1e-4)
    plain = decoder.start(source, kind=kind, capacity=8)
    assert cache.nbytes - table_bytes(cache) == 2 * (plain.nbytes - table_bytes(plain))


@every_kind
def test_what_a_cache_shows_of_itself(model, kind):
    cache = model.decoder.start(model.random(2, 3, D), kind=kind, capacity=4, beams=2)
    model.decoder(model.random(4, 3, D), cache)
    assert repr(cache) == (
        f"DecoderCache({kind}, 2 layers, 2 sentences of 2 beams, 3 tokens held, source of 3, float64 on cpu, "
        f"{cache.nbytes:,} bytes)"
    )
    cache.crop(torch.tensor([1, 3, 2, 2]))
    assert "1 to 3 tokens held" in repr(cache)


@every_kind
def test_inference_mode_may_begin_and_end_anywhere(model, kind):
    with torch.inference_mode():
        grid = Grid(model, [3, 5], kind)
        grid.step(2)
    with torch.no_grad():
        grid.step(1)
    grid.expand(2)
    grid.step(1)
    with torch.inference_mode():
        grid.reorder([[1, 0], [0, 0]])
        grid.crop([3, 2, 3, 1])
        grid.step(1)
    other = Grid(model, [7], kind)
    grid.admit(1, other)
    grid.step(40)
    with torch.inference_mode():
        grid.compact([1])
    grid.step(1)


@every_kind
@pytest.mark.parametrize("beams", [1, 3])
def test_a_source_of_padding_alone_is_finite_and_disturbs_no_other_row(model, kind, beams):
    memory = model.random(2, 4, D)
    padding = torch.tensor([[True] * 4, [False, False, False, True]])
    memory[padding] = float("nan")  # what some encoders leave there
    cache = model.decoder.start(memory, padding, kind=kind, capacity=8, beams=beams)
    ids = model.ids(2 * beams, 5)
    outputs = torch.cat([model.step(part, cache) for part in ids.split([1, 3, 1], dim=1)], dim=1)
    assert torch.isfinite(outputs).all()
    for row in range(beams, 2 * beams):
        assert_close(outputs[row], model.oracle(ids[row], memory[1, :3]))


@every_kind
def test_a_float_padding_mask_of_the_source(model, kind):
    source, ids = model.sources(3)[0], model.ids(1, 4)
    memory = torch.cat([source, model.random(2, D)])[None]
    padding = torch.tensor([[0.0, 0.0, 0.0, float("-inf"), float("-inf")]])
    cache = model.decoder.start(memory, padding, kind=kind, capacity=8)
    assert_close(model.step(ids, cache)[0], model.oracle(ids[0], source))


def test_static_full_says_so_and_the_slots_left_are_usable(model):
    grid = Grid(model, [3, 4], "static", capacity=5)
    grid.step(3)
    before = [state.k[:, :, :3].clone() for state in grid.cache.states]
    for T in (3, 50):
        with pytest.raises(CacheFullError, match=rf"{3 + T} slots.*capacity is 5"):
            grid.step(T)
        assert grid.cache.lengths.tolist() == [3, 3]
        assert all(torch.equal(state.k[:, :, :3], k) for state, k in zip(grid.cache.states, before, strict=True))
    grid.step(2)
    with pytest.raises(CacheFullError):
        grid.step(1)
    grid.crop(4)
    grid.step(1)


def test_static_is_allocated_once_and_written_in_place(model):
    grid = Grid(model, [3, 4], "static", capacity=20, beams=2)
    addresses = [(state.k.data_ptr(), state.v.data_ptr()) for state in grid.cache.states]
    grid.step(3)
    grid.reorder([[1, 0], [1, 1]])
    grid.step(9)
    grid.crop([2, 5, 3, 12])
    grid.admit(0, Grid(model, [9], "static", capacity=2))
    grid.compact([1])
    grid.step(2)
    grid.cache.reset()
    assert addresses == [(state.k.data_ptr(), state.v.data_ptr()) for state in grid.cache.states]


def test_dynamic_grows_past_any_first_guess(model, block):
    grid = Grid(model, [3, 4], "dynamic", capacity=1)
    for size in (1, 1, 1, 5, 40):
        grid.step(size)


# -- the transaction ----------


@every_kind
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_an_aborted_step_never_happened(kind, tokens, ragged, block):
    model = Model()
    grid = Grid(model, [3, 4], kind)
    grid.step(3)
    if ragged:
        grid.crop([1, 3])

    def broken(*_: object) -> Tensor:
        raise KeyboardInterrupt

    layer = model.decoder.layers[1]
    layer.run = broken
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.decoder(torch.full((2, tokens, D), float("nan"), dtype=FP64), grid.cache)
    del layer.run
    assert grid.cache.lengths.tolist() == ([1, 3] if ragged else [3, 3])
    assert grid.cache.positions(1)[:, 0].tolist() == grid.cache.lengths.tolist()
    grid.step(1)  # and every slot beyond it is zero again
    grid.step(2)


CHANGES = {
    "crop": lambda cache: cache.crop(1),
    "reset": lambda cache: cache.reset(),
    "expand": lambda cache: cache.expand(2),
    "reorder": lambda cache: cache.reorder(torch.tensor([[1, 0], [0, 0]])),
    "compact": lambda cache: cache.compact(torch.tensor([1])),
    "begin": lambda cache: cache.begin(1),
    "rollback": lambda cache: cache.rollback(),
}


@every_kind
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_left_open_is_forgotten_by_what_comes_next(model, kind, change):
    cache = model.start(model.sources(3, 3), kind, beams=1 if change == "expand" else 2)
    model.step(model.ids(cache.rows, 2), cache)
    step = cache.begin(3)
    nan = torch.full((cache.rows, H, 3, D // H), float("nan"), dtype=FP64)
    step.layers[0].update(nan, nan)
    CHANGES[change](cache)
    assert_zero_beyond_lengths(cache)
    with pytest.raises(RuntimeError, match="not the open one"):
        cache.commit(step)
    with pytest.raises(RuntimeError, match="over"):
        step.layers[1].update(nan, nan)
    assert_zero_beyond_lengths(cache)


@every_kind
def test_only_a_complete_open_step_is_committed(model, kind):
    cache = model.start(model.sources(3), kind)
    step = cache.begin(2)
    new = model.random(1, H, 2, D // H)
    step.layers[0].update(new, new)
    with pytest.raises(RuntimeError, match=r"layers \[1\]"):
        cache.commit(step)
    assert cache.length == 0
    k, v = step.layers[1].update(new, 2 * new)
    assert torch.equal(k, new) and torch.equal(v, 2 * new)
    cache.commit(step)
    assert cache.length == 2
    for action in (lambda: cache.commit(step), lambda: step.layers[0].update(new, new)):
        with pytest.raises(RuntimeError):
            action()
    foreign = model.start(model.sources(3), kind).begin(1)
    with pytest.raises(RuntimeError, match="another cache"):
        cache.commit(foreign)
    with pytest.raises(ValueError, match="at least one token"):
        cache.begin(0)
    assert cache.length == 2


@every_kind
@pytest.mark.parametrize("shape", [(1, H, 3, 8), (2, H, 1, 8), (2, H, 4, 8), (4, H, 3, 8)])
@pytest.mark.parametrize("ragged", [False, True])
def test_new_keys_of_another_shape_are_refused_not_broadcast(model, kind, shape, ragged):
    grid = Grid(model, [3, 3], kind)
    if ragged:
        grid.step(2)
        grid.crop([1, 2])
    step = grid.cache.begin(3)
    with pytest.raises(ValueError, match="3 tokens on 2 rows"):
        step.layers[0].update(torch.ones(shape, dtype=FP64), torch.ones(shape, dtype=FP64))
    grid.step(1)


@every_kind
def test_lengths_are_the_caches_own(model, kind):
    """Neither the tensor it gives out nor the one it was given is the one it keeps."""
    grid = Grid(model, [3, 3], kind)
    grid.step(5)
    mine = torch.tensor([4, 3])
    grid.cache.crop(mine)
    mine[0] = 1
    assert grid.cache.lengths.tolist() == [4, 3]
    theirs = grid.cache.lengths
    theirs[0] = 2
    assert grid.cache.lengths.tolist() == [4, 3]
    grid.cache.crop(theirs)
    assert_zero_beyond_lengths(grid.cache)


# -- the life of a grid ----------


@every_kind
@pytest.mark.parametrize("past", [0, 3])
def test_expand_copies_every_row(model, kind, past, block):
    grid = Grid(model, [4, 2, 3], kind)
    if past:
        grid.step(past)
    grid.expand(3)
    grid.step(1)
    grid.step(2)
    with pytest.raises(ValueError, match="already holds 3"):
        grid.cache.expand(2)


@every_kind
def test_beams_from_the_start_are_rows_of_one_source(model, kind):
    """K beams equal K separate rows, and the source is held once for each sentence."""
    grid = Grid(model, [4, 2], kind, beams=4)
    for size in (1, 3, 1):
        grid.step(size)
    cross = grid.cache.sources[0]
    assert cross.k.shape == cross.v.shape == (2, H, 4, D // H)


@every_kind
def test_reorder_within_sentences(model, kind, block):
    grid = Grid(model, [4, 2, 3], kind, beams=3)
    for beam in ([[2, 0, 1]] * 3, [[1, 1, 1], [0, 1, 2], [2, 2, 0]], [[0, 1, 2], [0, 0, 2], [0, 1, 2]]):
        grid.step(1)
        grid.reorder(beam)
        grid.step(2)


@every_kind
def test_reorder_of_ragged_rows(model, kind):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(4)
    grid.crop([4, 2, 1, 3])
    grid.reorder([[1, 1], [1, 0]])
    grid.step(1)
    assert grid.cache.lengths.tolist() == [3, 3, 4, 2]


@every_kind
def test_an_identity_reorder_costs_nothing(model, kind, monkeypatch):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(2)
    monkeypatch.setattr(CACHE_KINDS[kind], "select", lambda *_: pytest.fail("rows were copied"))
    grid.reorder([[0, 1], [0, 1]])
    grid.step(1)


@every_kind
@pytest.mark.parametrize(
    "beam",
    [[[0, 2], [0, 1]], [[0, -1], [0, 1]], [[2, 3], [0, 1]], [[0, 1]], [0, 1, 0, 1], [[0, 1], [0, 1], [0, 1]]],
    ids=str,
)
def test_reorder_refuses_what_leaves_the_sentence(model, kind, beam):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(2)
    with pytest.raises(ValueError, match="reorder"):
        grid.cache.reorder(torch.tensor(beam))
    grid.step(1)


@every_kind
@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("keep", [[0, 2], [1], [0, 1, 2]], ids=str)
def test_compact_keeps_sentences(model, kind, keep, as_mask, block):
    grid = Grid(model, [2, 6, 3], kind, beams=2)
    grid.step(3)
    grid.compact(keep, as_mask)
    grid.step(1)
    grid.crop([1] + [3] * (2 * len(keep) - 1))
    grid.step(30)


@every_kind
def test_compact_may_reorder_and_may_keep_none(model, kind):
    grid = Grid(model, [2, 6, 3], kind)
    grid.step(2)
    grid.compact([2, 0])
    grid.step(1)
    grid.compact([])
    assert (grid.cache.rows, grid.cache.batch_size, grid.cache.lengths.tolist()) == (0, 0, [])
    assert model.step(model.ids(0, 1), grid.cache).shape == (0, 1, D)


@every_kind
@pytest.mark.parametrize(
    "keep",
    [
        torch.tensor([0, 3]),
        torch.tensor([-1]),
        torch.tensor([1, 1]),
        torch.tensor([True, False]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 1]]),
        torch.tensor(1),
    ],
    ids=str,
)
def test_compact_refuses(model, kind, keep):
    grid = Grid(model, [2, 6, 3], kind)
    grid.step(2)
    with pytest.raises(ValueError, match="compact"):
        grid.cache.compact(keep)
    grid.step(1)


@every_kind
@pytest.mark.parametrize("source", [1, 4, 9])
@pytest.mark.parametrize("others", [[4, 4], [2, 4]], ids=str)
@pytest.mark.parametrize("already", [0, 2, 8])
@pytest.mark.parametrize("beams", [1, 2])
def test_admit_in_the_middle_of_decoding(model, kind, source, others, already, beams, block):
    """The admitted sentence and its neighbours each go on as if alone, their lengths unequal from here."""
    grid = Grid(model, others, kind, beams=beams)
    grid.step(5)
    waiting = Grid(model, [source], kind)
    if already:
        waiting.step(already)
    grid.admit(1, waiting)
    for size in (1, 3, 1):
        grid.step(size)
    assert waiting.cache.lengths.tolist() == [already]
    if already:
        waiting.step(1)
    grid.admit(0, Grid(model, [3], kind))
    grid.step(1)
    grid.compact([1])
    grid.step(2)


@every_kind
def test_admit_with_beams_of_its_own_and_from_another_kind(model, kind):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(3)
    for other in KINDS:
        waiting = Grid(model, [3], other, beams=2, capacity=40)
        waiting.step(2)
        waiting.crop([1, 2])
        grid.admit(0, waiting)
        grid.step(2)


@every_kind
def test_admit_of_a_padded_source(model, kind):
    """A waiting sentence taken out of a padded batch brings its padding along."""
    grid = Grid(model, [3, 3], kind)
    grid.step(2)
    batch = Grid(model, [2, 6], kind)
    batch.step(1)
    batch.compact([0])
    grid.admit(0, batch)
    for _ in range(3):
        grid.step(1)


@every_kind
def test_admit_refuses_what_does_not_fit(model, kind):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(2)
    narrow = CachedDecoder([model.decoder.layers[0]])
    cases = [
        (2, model.start(model.sources(3), kind), r"slots \[2\]"),
        (-1, model.start(model.sources(3), kind), r"slots \[-1\]"),
        (0, model.start(model.sources(3, 3), kind), "1 sentences of 1 or 2 beams"),
        (0, model.start(model.sources(3), kind, beams=3), "1 sentences of 1 or 2 beams"),
        (0, narrow.start(model.random(1, 3, D), kind=kind, capacity=8), "layers"),
    ]
    for slot, source, message in cases:
        with pytest.raises(ValueError, match=message):
            grid.cache.admit(slot, source)
    with pytest.raises(ValueError, match="layers"):
        grid.cache.reset(narrow.start(model.random(2, 3, D), kind=kind, capacity=8))
    grid.step(1)


def test_admit_into_a_static_cache_too_small_changes_nothing(model):
    grid = Grid(model, [4, 2], "static", capacity=6)
    grid.step(3)
    waiting = Grid(model, [3], "dynamic")
    waiting.step(7)
    with pytest.raises(CacheFullError):
        grid.cache.admit(0, waiting.cache)
    grid.step(1)


@every_kind
@pytest.mark.parametrize("lengths", [0, 2, 5, [5, 5, 5], [0, 5, 3], [4, 1, 2]], ids=str)
def test_crop_then_other_tokens(model, kind, lengths, block):
    grid = Grid(model, [4, 2, 3], kind)
    grid.step(5)
    grid.crop(lengths)
    grid.step(1)
    grid.step(3)


@every_kind
@pytest.mark.parametrize("lengths", [-1, 6, torch.tensor([5, 6]), torch.tensor([1]), torch.tensor([-1, 2])], ids=str)
def test_crop_refuses_to_lengthen(model, kind, lengths):
    grid = Grid(model, [4, 2], kind)
    grid.step(5)
    with pytest.raises(ValueError, match="crop"):
        grid.cache.crop(lengths)
    grid.step(1)


@every_kind
@pytest.mark.parametrize(("first", "second"), [(3, 9), (9, 3), (40, 2)])
def test_reset_forgets(model, kind, first, second, block):
    """Y after X with the same cache is Y with a fresh one, Y longer or shorter than X."""
    grid = Grid(model, [4, 2], kind)
    grid.step(first)
    grid.cache.reset()
    grid.history = [history[:0] for history in grid.history]
    grid.check()
    assert grid.cache.length == 0
    for size in (1, second - 1):
        grid.step(size)


@every_kind
@pytest.mark.parametrize("lengths", [[7, 7], [1, 3], [4, 2]], ids=str)
def test_reset_with_another_source(model, kind, lengths):
    grid = Grid(model, [4, 2], kind, beams=2)
    grid.step(5)
    other = Grid(model, lengths, kind)
    grid.cache.reset(other.cache)
    grid.sources, grid.history = other.sources, [history[:0] for history in grid.history]
    for size in (1, 2):
        grid.step(size)
        other.step(size)
    with pytest.raises(ValueError, match="2 sentences, not 1"):
        grid.cache.reset(model.start(model.sources(3), kind))
    grid.step(1)


@every_kind
def test_reset_with_another_source_shares_nothing_with_it(model, kind):
    """The source that was taken over goes on decoding its own, whatever is admitted into the other; room stays."""
    grid, other = Grid(model, [4, 2], kind, source_capacity=9), Grid(model, [3, 5], kind)
    addresses = [source.k.data_ptr() for source in grid.cache.sources]
    grid.cache.reset(other.cache)
    grid.cache.admit(0, model.start(model.sources(7), kind))
    other.step(2)
    grid.cache.reset()
    grid.cache.reset(other.cache)
    grid.sources, grid.history = other.sources, [history[:0] for history in grid.history]
    grid.step(2)
    assert [source.k.data_ptr() for source in grid.cache.sources] == addresses


@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_operations(kind, seed):
    """Whatever is done to a grid in whatever order, every row decodes as if it were alone."""
    model = Model()
    chance = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=chance))

    grid = Grid(model, [1 + below(6) for _ in range(4)], kind, beams=1 + seed % 3)
    for _ in range(14):
        grid.step(1 + below(3))
        B, K = grid.cache.batch_size, grid.cache.beams
        match below(5):
            case 0:
                grid.reorder(torch.randint(K, (B, K), generator=chance).tolist())
            case 1 if B > 2:
                grid.compact(torch.randperm(B, generator=chance)[: B - 1].tolist())
            case 2:
                waiting = Grid(model, [1 + below(8)], kind)
                if below(2):
                    waiting.step(1 + below(4))
                grid.admit(below(B), waiting)
            case 3:
                grid.crop([below(len(history) + 1) for history in grid.history])
            case 4 if K == 1 and B < 3:
                grid.expand(2)


# -- views, bytes, kinds ----------


@every_kind
def test_views_are_whole_blocks_with_a_zero_tail(model, kind):
    cache = model.start(model.sources(3, 3), kind, capacity=100, block=64)
    for past, T, visible in ((0, 3, 64), (3, 61, 64), (64, 1, 128)):
        assert cache.length == past
        step = cache.begin(T)
        assert {layer.view.visible for layer in step.layers} == {visible}
        new = model.random(2, H, T, D // H)
        for layer in step.layers:
            k, v = layer.update(new, new + 1)
            assert k.shape == v.shape == (2, H, visible, D // H)
            assert torch.equal(k[:, :, past : past + T], new) and torch.equal(v[:, :, past : past + T], new + 1)
            assert not k[:, :, past + T :].any() and not v[:, :, past + T :].any()
        cache.commit(step)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "paged"])  # which has a test of its own
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nbytes_is_what_is_allocated(kind, beams, dtype):
    B, S, capacity = 3, 7, 10
    stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, FF, batch_first=True, dtype=dtype), LAYERS).eval()
    decoder = CachedDecoder.from_torch(stack)
    cache = decoder.start(torch.zeros(B, S, D, dtype=dtype), kind=kind, capacity=capacity, beams=beams)
    width, both = torch.empty(0, dtype=dtype).element_size() * D, 2 * LAYERS
    cross = both * B * S * width
    table = 4 * B * beams if kind == "indirect" else 0  # an int32 for each slot of a row and one for its home, once
    assert cache.nbytes == both * B * beams * capacity * width + cross + table * (capacity + 1)
    decoder(torch.zeros(B * beams, capacity, D, dtype=dtype), cache)
    assert cache.nbytes == both * B * beams * capacity * width + cross + table * (capacity + 1)
    if kind != "static":
        decoder(torch.zeros(B * beams, 1, D, dtype=dtype), cache)
        assert cache.nbytes == both * B * beams * 2 * capacity * width + cross + table * (2 * capacity + 1)


def test_an_unknown_kind_lists_the_known(model):
    with pytest.raises(ValueError, match=rf"'elastic'.*{', '.join(KINDS)}"):
        model.decoder.start(model.random(1, 3, D), kind="elastic")


@every_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity 0"),
        ({"capacity": -3}, "capacity -3"),
        ({"beams": 0, "capacity": 4}, "beams 0"),
    ],
)
def test_impossible_sizes_are_refused(model, kind, options, message):
    with pytest.raises(ValueError, match=message):
        model.decoder.start(model.random(1, 3, D), kind=kind, **options)


def test_static_needs_a_capacity(model):
    with pytest.raises(ValueError, match="needs a capacity"):
        model.decoder.start(model.random(1, 3, D), kind="static")


def test_start_refuses_a_memory_or_padding_of_another_shape(model):
    with pytest.raises(ValueError, match="8 wide"):
        model.decoder.start(model.random(1, 3, 8))
    with pytest.raises(ValueError, match="memory_key_padding_mask"):
        model.decoder.start(model.random(2, 3, D), torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="memory_key_padding_mask"):
        model.decoder.start(model.random(2, 3, D), torch.zeros(1, 3, dtype=torch.bool))


class Bare(KeyValueState):
    """A container that appends and shows, and can do nothing else."""

    kind = "bare"

    def __init__(self) -> None:
        self.inner = DynamicCache(CacheSpec(), 2, H, D // H, dtype=FP64)

    def begin(self, step: Step) -> View:
        return self.inner.begin(step)

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        self.inner.append(k, v, step, view)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        return self.inner.shown(view)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


OPERATIONS = {
    "expand": lambda cache, _: cache.expand(2),
    "reorder": lambda cache, _: cache.reorder(torch.tensor([[1, 0]])),
    "compact": lambda cache, _: cache.compact(torch.tensor([0])),
    "admit": lambda cache, other: cache.admit(0, other),
    "crop": lambda cache, _: cache.crop(1),
    "reset": lambda cache, _: cache.reset(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_container_cannot_do_it_refuses_by_name(model, operation):
    grid = (1, 2) if operation == "reorder" else (2, 1)
    cross = model.start(model.sources(*[3] * grid[0]), "dynamic")
    cache = DecoderCache([Bare(), Bare()], cross.sources, CacheSpec(beams=grid[1]), batch_size=grid[0])
    step = cache.begin(2)
    new = model.random(2, H, 2, D // H)
    for layer in step.layers:
        layer.update(new, new)
    cache.commit(step)
    with pytest.raises(UnsupportedCacheOperation, match=rf"'bare'.*{operation}"):
        OPERATIONS[operation](cache, model.start(model.sources(3), "dynamic"))
    assert (cache.batch_size, cache.beams, cache.lengths.tolist()) == (*grid, [2, 2])


@pytest.mark.parametrize("container", [None, (torch.zeros(1), torch.zeros(1)), nn.Identity()])
def test_what_is_no_container_is_refused(container):
    empty = torch.zeros(1, H, 1, D // H)
    with pytest.raises(TypeError, match=f"layer 0: {type(container).__name__} is not a LayerState"):
        DecoderCache([container], [SourceState(empty, empty)], CacheSpec(), batch_size=1)


@every_kind
def test_a_dropped_cache_is_freed_at_once_not_when_the_garbage_collector_comes(model, kind):
    gc.disable()
    try:
        cache = model.decoder.start(model.random(1, 3, D), kind=kind, capacity=4)
        model.decoder(model.random(1, 1, D), cache)
        kept = [weakref.ref(cache), *(weakref.ref(state) for state in cache.states)]
        del cache
        assert not any(reference() for reference in kept)
    finally:
        gc.enable()
