"""What holds for every structure: steps are the whole pass, whatever happens to the grid, in every engine."""

import functools
import random
from typing import Any

import pytest
import torch

from tests.helpers import ENGLISH, tiny_checkpoint, tiny_model
from tests.translator.attention.grid import FP64, LAYERS, TOLERANCE, D, Grid, decoder_of, live, with_options
from translator.attention import STRUCTURES, Packing
from translator.cache import CacheSpec, UnsupportedCacheOperation
from translator.diagnostics.parity.check import check_parity
from translator.engine.eager import EagerEngine
from translator.engine.native import library
from translator.engine.packed import PackedEngine
from translator.model import TranslationModel

pytestmark = pytest.mark.numeric
needs_kernels = pytest.mark.skipif(not library.available(), reason="no native kernels here")

ALL = ("dynamic", "indirect", "static")
ONE = ("dynamic",)
LATENT, LIGHT, HEAVY = (
    {"kv_rank": 6, "rotary_width": 4},
    {"rate": 2, "top_k": 2, "window": 3, "index_width": 4},
    {"rate": 4, "top_k": 0, "window": 5},
)
# name of the structure, options small enough that everything happens within a few tokens, whether rows can be cropped
# (None: while they have lost nothing), kinds of container that its state depends on
CASES: dict[str, tuple[str, dict[str, Any], bool | None, tuple[str, ...]]] = {
    "chunked": ("chunked", {"window": 4}, None, ONE),
    "compressed, light": ("compressed", LIGHT, False, ("dynamic", "static")),
    "compressed, heavy": ("compressed", HEAVY, False, ONE),
    "grouped": ("grouped", {"kv_heads": 1}, True, ALL),
    "latent": ("latent", LATENT, True, ALL),
    "latent, expanded": ("latent", {**LATENT, "absorbed": False}, True, ONE),
    "linear": ("linear", {"convolution": 3}, False, ONE),
    "multihead": ("multihead", {}, True, ONE),
    "none": ("none", {}, True, ONE),
    "rotary": ("grouped", {"rotary": 100.0}, True, ONE),
    "sink": ("grouped", {"sink": True}, True, ALL),
    "window": ("window", {"window": 4}, None, ALL),
    "window of one": ("window", {"window": 1}, None, ONE),
    "window, all options": ("window", {"window": 3, "kv_heads": 1, "rotary": True, "sink": True}, None, ONE),
}
# Stacks of several, each a name with options.
STACKS: dict[str, tuple[list[tuple[str, dict[str, Any]]], bool | None]] = {
    "shared": ([("multihead", {}), ("shared", {})], True),
    "shared, turned, of one head": ([("grouped", {"kv_heads": 1, "rotary": True}), ("none", {}), ("shared", {})], True),
    "shared window": ([("window", {"window": 3}), ("shared", {}), ("shared", {})], None),
    "everything": (
        [("linear", {}), ("window", {"window": 5}), ("chunked", {"window": 5}), ("shared", {}), ("multihead", {}),
         ("none", {}), ("shared", {}), ("latent", LATENT), ("compressed", LIGHT)], False,
    ),
}  # fmt: skip
# Models for training and for engines, their windows small enough to slide.
MODELS: dict[str, dict[str, Any]] = {name: {"attention": name} for name, *_ in CASES.values()} | {
    "window": {"decoder_layers": ({"attention": "window", "window": 5}, {"attention": "window", "window": 3})},
    "chunked": {"decoder_layers": ({"attention": "chunked", "window": 5}, "chunked")},
    "compressed": {"decoder_layers": ({"attention": "compressed", **LIGHT}, {"attention": "compressed", **HEAVY})},
    "grouped": {"decoder_layers": ({"attention": "grouped", "kv_heads": 2, "rotary": True}, "grouped")},
    "sink": {"decoder_layers": ({"attention": "grouped", "kv_heads": 1, "sink": True}, "multihead")},
    "latent": {"decoder_layers": ({"attention": "latent", **LATENT}, "latent")},
    "shared": {"decoder_layers": ("multihead", "shared")},
    "shared window": {"decoder_layers": ({"attention": "window", "window": 4, "rotary": True}, "shared")},
}
every_model = pytest.mark.parametrize("name", sorted(MODELS))
every_case = pytest.mark.parametrize("case", [*CASES, *STACKS])
every_kind = pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in CASES for kind in CASES[case][3]]
    + [(case, kind) for case in STACKS for kind in (ALL if len(STACKS[case][0]) < 4 else ("indirect",))],
)


def decoder(case: str, **changes: Any) -> Any:
    if case in STACKS:
        return decoder_of([with_options(STRUCTURES[name], options) for name, options in STACKS[case][0]])
    name, options, *_ = CASES[case]
    return decoder_of(STRUCTURES[name], **{**options, **changes})


@every_case
def test_the_whole_pass_is_what_the_reference_says(case):
    made = decoder(case)
    grid = Grid(made, [3, 5], "dynamic")
    x, memory = grid.random(2, 17, D), grid.random(2, 4, D)
    whole, expected = made(x, memory, tgt_is_causal=True), grid.oracle(x, memory)
    assert (whole - expected).abs().max() <= TOLERANCE * expected.abs().max()


@every_kind
@pytest.mark.parametrize("sizes", [[1] * 17, [17], [5, 1, 1, 4, 6], [2, 3, 1, 1, 1, 9]], ids=str)
def test_steps_of_any_size_are_the_whole_pass(case, kind, sizes):
    grid = Grid(decoder(case), [3, 5], kind)
    for T in sizes:
        grid.step(T)


@every_kind
def test_beams_and_sentences_that_come_and_go(case, kind):
    grid = Grid(decoder(case), [3, 5, 4], kind)
    grid.step(4)
    grid.expand(3)
    grid.reorder(torch.tensor([[1, 2, 0], [2, 2, 1], [0, 0, 1]]))
    grid.step(1)
    grid.reorder(torch.tensor([[2, 0, 0], [0, 1, 2], [1, 2, 1]]))
    grid.step(2)
    newcomer, parted = Grid(grid.decoder, [6], kind, 1), Grid(grid.decoder, [2], kind, 2, beams=3)
    newcomer.step(3)
    parted.step(1)
    parted.step(9)
    parted.reorder(torch.tensor([[2, 0, 1]]))
    grid.admit(1, newcomer)  # rows of 7, 3 and 10 tokens from here on
    grid.admit(2, parted)
    for T in (1, 1, 5, 1, 2):
        grid.step(T)
        grid.reorder(torch.tensor([[1, 1, 0], [2, 0, 2], [0, 2, 1]]))
    grid.compact([2, 0])
    grid.step(3)


@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_a_grid(case, kind, seed):
    chance = random.Random(seed)
    crops = STACKS[case][1] if case in STACKS else CASES[case][2]
    grid = Grid(decoder(case), [chance.randint(1, 5) for _ in range(chance.randint(1, 3))], kind, seed)
    live(grid, chance, kind, 14, crops=crops)


@every_kind
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_that_raises_never_happened(case, kind, layer):
    grid = Grid(decoder(case), [3, 5], kind, beams=2)
    grid.step(5)
    before = grid.cache.nbytes
    grid.fail(3, layer, taken_back=False)
    grid.step(1)
    grid.fail(1, layer, taken_back=True)
    grid.step(7)
    assert grid.cache.length == 13 and grid.cache.nbytes >= before


@every_case
def test_a_state_moves_to_another_type_with_all_it_holds(case):
    grid = Grid(decoder(case), [3, 5], "dynamic")
    grid.step(6)
    grid.cache.to(dtype=torch.float32).to(dtype=FP64)
    x = grid.random(2, 3, D)
    output = grid.decoder(x, grid.cache)
    rows = torch.stack([torch.cat([row, new]) for row, new in zip(grid.rows, x, strict=True)])
    for index in range(2):
        expected = grid.oracle(rows[index][None], grid.sources[index][None])[0, -3:]
        assert 0 < (output[index] - expected).abs().max() < 1e-4 * expected.abs().max()


# -- without padding --------------------------------------------------------------------------------------------------


@functools.lru_cache
def model_of(name: str) -> TranslationModel:
    return tiny_model.__wrapped__(**MODELS[name])


@every_model
def test_a_pass_without_padding_keeps_sentences_apart(name):
    """Training lays sentences one after another: none may see its neighbour, forward or backward."""
    model = model_of(name)
    generator = torch.Generator().manual_seed(2)
    lengths = [(4, 9), (7, 1), (2, 23), (5, 6)]
    sentences = [[torch.randint(4, 400, (length,), generator=generator) for length in pair] for pair in lengths]
    sources, targets = ([pair[side] for pair in sentences] for side in (0, 1))
    parameters = [parameter.requires_grad_() for parameter in model.parameters()]
    try:
        packed = model.packed(
            torch.cat(sources),
            torch.cat(targets),
            Packing([len(s) for s in sources]),
            Packing([len(t) for t in targets]),
        )
        alone = torch.cat([model.decode(t[None], model.encode(s[None]))[0] for s, t in sentences])
        assert (packed - alone).abs().max() < 1e-4 * alone.abs().max()
        weights = torch.randn(alone.shape, generator=generator)
        found, expected = (
            torch.autograd.grad((each * weights).sum(), parameters, allow_unused=True) for each in (packed, alone)
        )
        for mine, theirs in zip(found, expected, strict=True):
            if mine is None or theirs is None:  # the norm before no attention
                assert mine is theirs
                continue
            assert (mine - theirs).abs().max() < 1e-3 * theirs.abs().max()
    finally:
        model.requires_grad_(False)


# -- the packed engine ------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(("release", "kind"), [(False, "dynamic"), (False, "static"), (True, "indirect")])
@every_model
def test_the_packed_engine_decodes_as_the_eager_one(name, kind, release):
    model = model_of(name)
    ids = torch.randint(4, 400, (3, 7), generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(7) >= torch.tensor([[7], [4], [5]])
    spec = CacheSpec(kind=kind, capacity=48, beams=2)
    plain = EagerEngine(model)
    fast = PackedEngine(tiny_model.__wrapped__(**MODELS[name]) if release else model, "float32", release=release)
    one, other = (engine.start(engine.encode(ids, hidden), hidden, spec) for engine in (plain, fast))
    generator = torch.Generator().manual_seed(3)
    for turn in range(40):
        tokens = torch.randint(4, 400, (one.cache.rows,), generator=generator)
        expected = one.step(tokens).logits()
        assert (other.step(tokens).logits() - expected).abs().max() < 1e-4 * expected.abs().max(), turn
        beam = torch.randint(2, (one.batch_size, 2), generator=generator)
        one.reorder(beam)
        other.reorder(beam)
        if turn == 20:
            one.compact(torch.tensor([2, 0]))
            other.compact(torch.tensor([2, 0]))


# -- what a state can't do --------------------------------------------------------------------------------------------


@every_case
def test_a_step_to_be_recorded_works_or_is_refused_by_name(case):
    grid = Grid(decoder(case), [3, 5], "static")
    try:
        grid.cache.prefix(1)
    except UnsupportedCacheOperation as refused:
        assert "cannot keep its addresses" in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed", "latent", "linear"])
def test_the_parity_check_passes_and_says_what_it_left_out(name):
    checkpoint, kinds = tiny_checkpoint(model=model_of(name)), ALL if name == "latent" else ("static",)
    report = check_parity(checkpoint, ENGLISH[:6], kinds=kinds, beam_size=3, max_tokens=16)
    assert report.passed, str(report)
    checks = {"whole prefix", "later tokens", "given tokens", "life of a grid", "greedy", "beam 3"}
    assert {check.name for check in report.judged} == checks
    assert ("cannot crop: its rows can be emptied" in str(report)) == (name != "latent")
