"""A container, structures and a search that someone else adds, through public names alone, hold up to every proof."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import ENGLISH, tiny_model, tiny_translator
from translator import CachedDecoder, CachedDecoderLayer, TranslationModel
from translator.attention import STRUCTURES, AttentionStep, Product, Structure, merge_heads, split_heads
from translator.cache import (
    CACHE_KINDS,
    CacheSpec,
    KeyValueState,
    LayerState,
    LayerStep,
    Lengths,
    NamedState,
    Step,
    UnsupportedCacheOperation,
    View,
    register,
)
from translator.config import DecodeConfig, ModelConfig
from translator.diagnostics.parity.self_test import SelfTestReport, random_model, self_test
from translator.engine import Scores
from translator.errors import UserError
from translator.operations import Operations
from translator.search import POLICIES, Choice, Grid, Policy, candidates, each_by_itself

pytestmark = pytest.mark.numeric

# -- a structure: fewer key heads than query heads, and rotary positions ----------------------------------------------


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """`x` `(rows, H, T, D_head)` turned by angles that grow with the position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    rates = 10.0 ** -torch.arange(half, dtype=x.dtype)
    angles = positions.to(x.dtype)[:, None, :, None] * rates  # (rows, 1, T, half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


class GroupedRotary(Structure):
    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = True, device=None, dtype=None, **_: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = num_heads, 1, embed_dim // num_heads
        factory = {"bias": bias, "device": device, "dtype": dtype}
        self.query = nn.Linear(embed_dim, embed_dim, **factory)
        self.key_value = nn.Linear(embed_dim, 2 * self.kv_heads * self.width, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **factory)

    def products(self) -> dict[str, Product]:
        return {name: (module.weight, module.bias) for name, module in self.named_children()}

    def new_state(self, spec: CacheSpec, rows: int) -> LayerState:
        weight = self.key_value.weight
        return spec.key_value_state(rows, self.kv_heads, self.width, dtype=weight.dtype, device=weight.device)

    def attend(
        self, x: Tensor, step: AttentionStep, ops: Operations, *, norm=None, dropout=None, residual=None
    ) -> Tensor:
        q = split_heads(ops.product("query", x, norm=norm), self.heads)
        k, v = (split_heads(part, self.kv_heads) for part in ops.product("key_value", x, norm=norm).chunk(2, dim=-1))
        q, k = rotated(q, step.positions), rotated(k, step.positions)
        attended = step.attend(q, k, v, ops.attention)
        return ops.product("out_proj", merge_heads(attended), dropout=dropout, residual=residual)

    def reference(self, x: Tensor) -> Tensor:
        T, positions = x.shape[1], torch.arange(x.shape[1]).unsqueeze(0)
        q = rotated(self.query(x).view(len(x), T, self.heads, self.width).transpose(1, 2), positions)
        k, v = self.key_value(x).view(len(x), T, 2, self.kv_heads, self.width).unbind(2)
        k = rotated(k.transpose(1, 2), positions)
        outputs = []
        for t in range(T):
            scores = torch.einsum("rhd,rgsd->rhs", q[:, :, t], k[:, :, : t + 1]) / math.sqrt(self.width)
            outputs.append(torch.einsum("rhs,rsgd->rhd", scores.softmax(-1), v[:, : t + 1]).flatten(1))
        return self.out_proj(torch.stack(outputs, dim=1))


# -- a structure with a state of its own: no keys, no values ----------------------------------------------------------


class Decay(Structure):
    """Each token adds to a sum that fades; what is read of it depends on the token."""

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = True, device=None, dtype=None, **_: Any) -> None:
        super().__init__()
        self.width = embed_dim
        self.value = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def products(self) -> dict[str, Product]:
        return {name: (module.weight, module.bias) for name, module in self.named_children()}

    def new_state(self, spec: CacheSpec, rows: int) -> LayerState:
        weight = self.value.weight
        return NamedState(rows, {"faded": (self.width,)}, dtype=weight.dtype, device=weight.device)

    def attend(
        self, x: Tensor, step: AttentionStep, ops: Operations, *, norm=None, dropout=None, residual=None
    ) -> Tensor:
        values = ops.product("value", x, norm=norm)
        gates = ops.product("gate", x, norm=norm, activation=torch.sigmoid)
        state = step.state
        faded = values.new_zeros(len(x), self.width) if state is None else state.current["faded"]
        read = []
        for t in range(x.shape[1]):
            faded = 0.7 * faded + values[:, t]
            read.append(gates[:, t] * faded)
        if state is not None:
            state.put(step, faded=faded)
        return ops.product("out_proj", torch.stack(read, dim=1), dropout=dropout, residual=residual)

    def reference(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        ages = torch.arange(T).unsqueeze(1) - torch.arange(T)
        weights = (0.7 ** ages.clamp(min=0).to(x.dtype)).tril()
        return self.out_proj(torch.sigmoid(self.gate(x)) * (weights @ self.value(x)))


# -- a container: K and V kept token by token in a Python list --------------------------------------------------------


class ListState(KeyValueState):
    """Nothing like a dense buffer: a list of slots, each `(rows, H_kv, 2, D_head)`."""

    kind = "list"

    def __init__(self, spec: CacheSpec, rows: int, heads: int, width: int, *, dtype=None, device=None) -> None:
        self.empty = torch.zeros(rows, heads, 2, width, dtype=dtype, device=device)
        self.slots: list[Tensor] = []

    def begin(self, step: Step) -> View:
        visible = -(-step.end // step.block) * step.block
        while len(self.slots) < visible:
            self.slots.append(self.empty.clone())
        return View(visible)

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        for row in range(len(k)):
            first = step.start if step.slots is None else int(step.slots[row, 0])
            for t in range(step.T):
                self.slots[first + t][row] = torch.stack([k[row, :, t], v[row, :, t]], dim=1)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        return tuple(torch.stack(self.slots[: view.visible], dim=2).unbind(3))  # (rows, H_kv, visible, 2, D_head)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def expand(self, beams: int, length: int) -> None:
        self.empty = self.empty.repeat_interleave(beams, dim=0)
        self.slots = [slot.repeat_interleave(beams, dim=0) for slot in self.slots]

    def select(self, rows: Tensor, length: int) -> None:
        self.empty = self.empty[rows]
        self.slots = [slot[rows] for slot in self.slots]

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        slots = [*self.slots, self.empty]
        held = torch.stack(slots, dim=2)[rows, :, :length]  # (rows, H_kv, length, 2, D_head)
        return {"k": held[..., 0, :], "v": held[..., 1, :]}

    def write(self, rows: slice, contents: dict[str, Tensor], length: int) -> None:
        while len(self.slots) < length:
            self.slots.append(self.empty.clone())
        for place, slot in enumerate(self.slots):
            slot[rows] = 0
            if place < length:
                slot[rows] = torch.stack([contents["k"][:, :, place], contents["v"][:, :, place]], dim=2)

    def clear(self, lengths: Lengths, until: int) -> None:
        for row, length in enumerate(lengths.tensor().tolist()):
            for slot in self.slots[length:]:
                slot[row] = 0

    def to(self, device, dtype) -> None:
        self.empty, self.slots = self.empty.to(device, dtype), [slot.to(device, dtype) for slot in self.slots]


@pytest.fixture
def extended(monkeypatch):
    monkeypatch.setitem(STRUCTURES, "grouped_rotary", GroupedRotary)
    monkeypatch.setitem(STRUCTURES, "decay", Decay)
    monkeypatch.setitem(CACHE_KINDS, ListState.kind, ListState)


def model_with(attention: str) -> TranslationModel:
    config = ModelConfig(
        vocab_size=19, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=24,
        max_positions=32, attention=attention,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = TranslationModel(config).double()
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.5)
    return model.eval()


def missed(report: SelfTestReport) -> list[tuple[str, str]]:
    return [(outcome.fault.name, outcome.kind) for outcome in report.outcomes if not outcome.caught]


def test_registering_makes_a_container_known_everywhere(monkeypatch):
    monkeypatch.delitem(CACHE_KINDS, "list", raising=False)
    try:
        assert register(ListState) is ListState
        assert CacheSpec(kind="list").kind == "list"
    finally:
        del CACHE_KINDS["list"]
    with pytest.raises(ValueError, match="unknown cache kind 'list'; known: dynamic, indirect, "):
        CacheSpec(kind="list")


@pytest.mark.slow
def test_a_container_of_ones_own_passes_every_check_and_catches_every_fault(extended):
    report = self_test(random_model(), kinds=["list"])
    assert missed(report) == []
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "indirect", "static", "list"])
def test_a_structure_with_fewer_key_heads_and_its_own_positions(extended, kind):
    report = self_test(model_with("grouped_rotary"), kinds=[kind])
    assert {check.name for check in report.clean} >= {"whole prefix", "life of a grid"}
    assert not any(check.verdict == "skipped" for check in report.clean)  # judged by its own reference
    assert missed(report) == []
    assert report.passed, str(report)


@pytest.mark.slow
def test_a_recurrent_structure_is_judged_too_and_what_it_cannot_do_is_named(extended):
    report = self_test(model_with("decay"), kinds=["dynamic"])
    life = next(check for check in report.clean if check.name == "life of a grid")
    assert life.verdict == "pass"
    assert life.tally.refused == {"cache kind 'recurrent' cannot crop: its rows can be emptied and not shortened"}
    unseen = {name for name, _ in missed(report)}
    # It isn't cropped, so that what goes wrong with rows of unequal length doesn't come about.
    assert unseen <= {"crop to the longest", "lengths not reordered"}
    assert not any(outcome.fault.key_values for outcome in report.outcomes)


def test_an_unknown_structure_names_the_known():
    with pytest.raises(UserError, match=r"'circular': unknown structure; known: .*multihead"):
        model_with("circular")


# -- different structures in one stack --------------------------------------------------------------------------------


def mixed_stack() -> CachedDecoder:
    torch.manual_seed(0)
    kinds = [None, GroupedRotary, Decay, None]
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "dtype": torch.float64}
    layers = [CachedDecoderLayer(16, 2, 24, structure=kind, **options) for kind in kinds]
    return CachedDecoder(layers).eval()


@pytest.mark.parametrize("kind", ["dynamic", "indirect", "static", "list"])
def test_mixed_structures_step_as_in_one_pass(extended, kind):
    decoder = mixed_stack()
    x, memory = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    whole = decoder(x, memory, tgt_is_causal=True)
    cache = decoder.start(memory, kind=kind, capacity=12)
    steps = [decoder(part, cache) for part in x.split([1, 4, 1, 3], dim=1)]
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["dynamic", "indirect", "static", "list"])
@pytest.mark.parametrize("broken", range(4))
def test_a_step_that_raises_in_any_layer_of_a_mixed_stack_never_happened(extended, kind, broken, monkeypatch):
    decoder = mixed_stack()
    x, memory = torch.randn(1, 5, 16, dtype=torch.float64), torch.randn(1, 4, 16, dtype=torch.float64)
    whole = decoder(x, memory, tgt_is_causal=True)
    cache = decoder.start(memory, kind=kind, capacity=12)
    decoder(x[:, :2], cache)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.layers[broken].linear1, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decoder(x[:, 2:4] * math.nan, cache)
    assert cache.length == 2
    later = decoder(x[:, 2:], cache)
    assert (later - whole[:, 2:]).abs().max() < 1e-10


def test_what_one_layer_cannot_do_is_refused_before_any_layer_changes(extended):
    decoder = mixed_stack()
    x, memory = torch.randn(1, 5, 16, dtype=torch.float64), torch.randn(1, 4, 16, dtype=torch.float64)
    whole = decoder(x, memory, tgt_is_causal=True)
    cache = decoder.start(memory)
    decoder(x[:, :3], cache)
    with pytest.raises(UnsupportedCacheOperation, match="'recurrent' cannot crop"):
        cache.crop(1)
    assert (decoder(x[:, 3:], cache) - whole[:, 3:]).abs().max() < 1e-10
    cache.reset()
    assert (decoder(x, cache) - whole).abs().max() < 1e-10


def test_a_window_beside_a_full_layer_disturbs_neither(extended, monkeypatch):
    """One state shows a window and another everything: each gets the mask that goes with its own view."""

    class Window(CACHE_KINDS["dynamic"]):
        def begin(self, step: Step) -> View:
            return super().begin(step)._replace(window=3)

    decoder = mixed_stack()
    x, memory = torch.randn(2, 8, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    cache = decoder.start(memory)
    original = cache.states[0]
    weight = decoder.layers[0].self_attn.in_proj_weight
    cache.states[0] = Window(CacheSpec(), 2, 2, 8, dtype=weight.dtype, device=weight.device)
    assert type(original) is CACHE_KINDS["dynamic"]
    steps = torch.cat([decoder(part, cache) for part in x.split([1, 3, 1, 3], dim=1)], dim=1)
    # The same with the first layer's mask written out, and the others run on its output.
    band = torch.ones(8, 8, dtype=torch.bool).triu(1) | torch.ones(8, 8, dtype=torch.bool).tril(-3)
    first = CachedDecoder([decoder.layers[0]])(x, memory, tgt_mask=band)
    rest = CachedDecoder(list(decoder.layers[1:]))(first, memory, tgt_is_causal=True)
    assert (steps - rest).abs().max() < 1e-10


def test_states_of_a_mixed_stack_are_what_their_structures_made():
    decoder = mixed_stack()
    cache = decoder.start(torch.randn(1, 4, 16).double(), spec=CacheSpec(kind="static", capacity=6, beams=2))
    assert [state.kind for state in cache.states] == ["static", "static", "recurrent", "static"]
    assert [tuple(state.k.shape) for state in (cache.states[0], cache.states[1])] == [(2, 2, 6, 8), (2, 1, 6, 8)]
    assert tuple(cache.states[2].current["faded"].shape) == (2, 16)
    assert isinstance(cache.begin(1).layers[2], LayerStep)


# -- a search ---------------------------------------------------------------------------------------------------------


class Humble(Policy):
    """Takes the second-best token: nobody would, so that nothing else can pass for it."""

    name = "humble"

    @classmethod
    def rows(cls, config: DecodeConfig) -> int:
        return 1

    def choose(self, scores: Scores, grid: Grid, banned: Tensor | None, forced: Tensor | None) -> Choice:
        values, ids = candidates(scores, 2, banned, forced)  # (B, 2)
        return each_by_itself(grid, ids[:, 1], values[:, 1])


@pytest.mark.parametrize("cache", ["dynamic", "list"])
def test_a_search_of_ones_own_runs_from_settings_to_text(extended, monkeypatch, cache):
    monkeypatch.setitem(POLICIES, "humble", Humble)
    translator = tiny_translator(cache=cache)
    lines = ENGLISH[:3]
    found = translator.candidates(lines, search="humble", max_length_factor=0, max_length_extra=6, split=False)
    for line, candidate in zip(lines, found, strict=True):
        ids, expected = [translator.tokenizer.bos_id], []
        memory = tiny_model().encode(torch.tensor([[*translator.tokenizer.encode(line), translator.tokenizer.eos_id]]))
        for _ in range(6):
            logits = tiny_model().logits(tiny_model().decode(torch.tensor([ids]), memory)[0, -1])
            logits[[translator.tokenizer.pad_id, translator.tokenizer.bos_id]] = -math.inf
            ids.append(int(logits.topk(2).indices[1]))
            expected.append(ids[-1])
            if ids[-1] == translator.tokenizer.eos_id:
                break
        assert translator.tokenizer.ids(candidate[0].tokens[0]) == expected


def test_the_container_of_the_contributors_page_steps_as_the_full_pass(monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    try:
        for code in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
            exec(compile(code, "CONTRIBUTING.md", "exec"), names)
        decoder = CachedDecoder([CachedDecoderLayer(16, 2, 24, dropout=0.0, batch_first=True) for _ in range(2)]).eval()
        x, memory = torch.randn(2, 6, 16), torch.randn(2, 3, 16)
        cache = decoder.start(memory, kind="newest")
        steps = [decoder(part, cache) for part in x.split([1, 3, 2], dim=1)]
        assert torch.allclose(torch.cat(steps, dim=1), decoder(x, memory, tgt_is_causal=True), atol=1e-5)
        cache.begin(1).layers[0].update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8))
        cache.rollback()
        assert cache.states[0].k.shape[2] == 6
        with pytest.raises(UnsupportedCacheOperation, match="'newest' cannot crop"):
            cache.crop(1)
    finally:
        CACHE_KINDS.pop("newest", None)
