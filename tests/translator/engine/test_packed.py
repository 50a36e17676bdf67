"""The packed engine against the plain one, and against itself in other company."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import VOCABULARY, tiny_model
from translator import CachedDecoder
from translator.attention import STRUCTURES, CachedMultiheadAttention
from translator.cache import CACHE_KINDS, CacheSpec
from translator.engine.eager import EagerEngine
from translator.engine.native.library import available
from translator.engine.packed import PackedEngine
from translator.errors import UserError
from translator.operations import EagerOperations

pytestmark = [pytest.mark.numeric, pytest.mark.skipif(not available(), reason="the native kernels aren't built")]

KINDS = sorted(CACHE_KINDS)
FLOATS = ("float32", "float16", "bfloat16")


def halved(model: nn.Module) -> nn.Module:
    """The model with weights that every float type holds."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16().float())
                parameter[parameter.abs() < 2**-10] = 0  # below that, half precision has fewer bits
    return model


def sources(lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random ids `(B, S)` and their padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    return ids, torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)


def decoded(engine, lengths=(7, 3, 9), beams=2, kind="dynamic", steps=45, seed=3) -> list[Tensor]:
    """Logits of forced steps, with beams reordered, a sentence that leaves and one that comes in."""
    ids, hidden = sources(list(lengths))
    spec = CacheSpec(kind=kind, capacity=steps + 2, beams=beams)
    decoding = engine.start(engine.encode(ids, hidden), hidden, spec)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        tokens = torch.randint(5, VOCABULARY, (len(lengths) * beams,), generator=generator)
        found.append(decoding.step(tokens[: decoding.batch_size * beams]).logits().clone())
        if step % 5 == 1:
            parents = torch.randint(0, beams, (len(lengths), beams), generator=generator)
            decoding.reorder(parents[: decoding.batch_size])
        if step == 20:
            decoding.compact(torch.tensor([2, 0]))
        if step == 30:
            more, padded = sources([12], seed=5)
            newcomer = engine.start(engine.encode(more, padded), padded, dataclasses.replace(spec, beams=1))
            newcomer.step(torch.tensor([6]))
            decoding.admit([1], newcomer)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute_type", FLOATS)
def test_logits_are_the_plain_engine_s(kind: str, compute_type: str) -> None:
    model = halved(tiny_model())
    plain, packed = decoded(EagerEngine(model), kind=kind), decoded(PackedEngine(model, compute_type), kind=kind)
    for step, (mine, theirs) in enumerate(zip(packed, plain, strict=True)):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max(), step


def test_a_float_type_that_holds_the_weights_gives_the_bits_of_float32() -> None:
    model = halved(tiny_model())
    first, *others = [decoded(PackedEngine(model, compute_type)) for compute_type in FLOATS]
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("compute_type", [*FLOATS, "int8"])
def test_no_bit_hangs_on_the_container_or_the_threads(compute_type: str) -> None:
    engine = PackedEngine(tiny_model(), compute_type, threads=1)
    first = decoded(engine)
    for kind in KINDS:
        assert all(map(torch.equal, first, decoded(engine, kind=kind))), kind
    for threads in (2, 3):
        assert all(map(torch.equal, first, decoded(PackedEngine(tiny_model(), compute_type, threads=threads))))


@pytest.mark.parametrize("compute_type", [*FLOATS, "int8"])
def test_no_bit_hangs_on_the_sentences_beside(compute_type: str) -> None:
    engine = PackedEngine(tiny_model(), compute_type)
    ids, hidden = sources([5, 11, 1, 8, 17, 2, 3])
    memory = engine.encode(ids, hidden)
    together = engine.start(memory, hidden, CacheSpec())
    alone = []
    for row, length in enumerate((~hidden).sum(dim=1).tolist()):
        own = engine.encode(ids[row : row + 1, :length])
        assert torch.equal(own[0], memory[row, :length])
        alone.append(engine.start(own, None, CacheSpec()))
    for step in range(40):
        tokens = (torch.arange(7) * 31 + step * 17) % 400 + 5
        logits = together.step(tokens).logits()
        for row, decoding in enumerate(alone):
            assert torch.equal(decoding.step(tokens[row : row + 1]).logits()[0], logits[row])


@pytest.mark.parametrize("compute_type", [*FLOATS, "int8"])
def test_a_step_gives_the_bits_of_a_pass_over_the_whole_target(compute_type: str) -> None:
    engine = PackedEngine(tiny_model(), compute_type)
    ids, hidden = sources([9, 4])
    memory = engine.encode(ids, hidden)
    target = (torch.arange(2 * 60).view(2, 60) * 37) % 400 + 5
    operations = engine.operations
    whole = operations.logits(engine.model.decode(target, memory, hidden, operations))
    decoding = engine.start(memory, hidden, CacheSpec())
    for t in range(60):
        assert torch.equal(decoding.step(target[:, t]).logits(), whole[:, t]), t


def test_steps_are_replayed() -> None:
    engine = PackedEngine(tiny_model())
    ids, hidden = sources([4, 4])
    decoding = engine.start(engine.encode(ids, hidden), hidden, CacheSpec(kind="static", capacity=40, beams=3))
    calls = []
    run = engine.model.decoder.run

    def counted(*arguments: object) -> Tensor:
        calls.append(1)
        return run(*arguments)

    engine.model.decoder.run = counted
    try:
        for step in range(20):
            decoding.step(torch.full((6,), 7))
            decoding.reorder(torch.tensor([[step % 3, 0, 1]] * 2))
    finally:
        del engine.model.decoder.run
    assert len(calls) == 1


def rounded(x: Tensor) -> Tensor:
    """Each row in 255 steps of its own."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


class RoundedOperations(EagerOperations):
    """The plain operations, with weights and inputs of products rounded as int8 rounds them."""

    def of(self, part: str) -> "RoundedOperations":
        return RoundedOperations(self.layer, self.layer._modules[part])

    def product(self, name, x, *, norm=None, activation=None, dropout=None, residual=None) -> Tensor:
        weight, bias = self.part.products()[name]
        x = x if norm is None else self.layer._modules[norm](x)
        y = F.linear(rounded(x.double()), rounded(weight.double()), None if bias is None else bias.double()).float()
        y = y if activation is None else activation(y)
        return y if residual is None else residual + y


def test_int8_rounds_weights_by_output_and_inputs_by_row() -> None:
    model = tiny_model(positions="sinusoidal")
    engine = PackedEngine(model, "int8")
    ids, hidden = sources([6, 9])
    operations = model.operations()
    for stack, layers in ((operations.encoder, model.encoder.layers), (operations.decoder, model.decoder.layers)):
        stack.layers = [RoundedOperations(layer) for layer in layers]
    target = (torch.arange(40).view(2, 20) * 37) % 400 + 5
    memory = engine.encode(ids, hidden)
    assert (memory - model.encode(ids, hidden, operations)).norm() < 0.02 * memory.norm()
    hidden_states = model.decode(target, memory, hidden, operations)
    expected = F.linear(rounded(hidden_states), rounded(model.embedding.weight))
    decoding = engine.start(memory, hidden, CacheSpec())
    got = torch.stack([decoding.step(target[:, t]).logits().clone() for t in range(20)], dim=1)
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_auto_is_the_narrowest_type_that_loses_nothing() -> None:
    assert PackedEngine(tiny_model()).compute_type == "float32"
    half = copy.deepcopy(tiny_model())
    for parameter in half.parameters():
        parameter.data = parameter.data.half().float()
    assert PackedEngine(half).compute_type == "float16"
    assert PackedEngine(halved(half)).compute_type == "float16"
    with pytest.raises(UserError, match=r"int4.*known: auto, float32"):
        PackedEngine(tiny_model(), "int4")


def test_weights_that_no_type_holds_are_refused() -> None:
    broken = copy.deepcopy(tiny_model())
    broken.decoder.layers[1].linear1.weight.data[3, 4] = 1e6
    PackedEngine(broken, "bfloat16")
    with pytest.raises(UserError, match=r"decoder\.layers\.1\.linear1"):
        PackedEngine(broken, "float16")


# -- a decoder of one's own -------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"norm_first": True},
    {"batch_first": True, "norm_first": True},
    {"bias": False, "batch_first": True},
    {"activation": "gelu", "norm_first": True},
    {"activation": nn.GELU()},
    {"activation": F.silu, "batch_first": True},
    {"layer_norm_eps": 1e-2, "dim_feedforward": 37},
]


@torch.no_grad()
@pytest.mark.parametrize("compute_type", ["float32", "int8"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_a_decoder_of_ones_own(options: dict, norm: bool, compute_type: str) -> None:
    torch.manual_seed(2)
    D = 24
    layer = nn.TransformerDecoderLayer(D, 3, **{"dim_feedforward": 40, **options})
    theirs = nn.TransformerDecoder(layer, 3, nn.LayerNorm(D) if norm else None).eval()
    decoder = CachedDecoder.from_torch(theirs)
    packed = decoder.packed(compute_type)
    first = decoder.batch_first
    memory, hidden = torch.randn(3, 6, D), torch.arange(6) >= torch.tensor([6, 2, 4]).unsqueeze(1)
    x = torch.randn(3, 50, D)

    def layout(part: Tensor) -> Tensor:
        return part if first else part.transpose(0, 1)

    cache = packed.start(layout(memory), hidden)
    whole = layout(
        theirs(layout(x), layout(memory), tgt_mask=nn.Transformer.generate_square_subsequent_mask(50),
               memory_key_padding_mask=hidden)
    )  # fmt: skip
    allowed = 1e-4 if compute_type == "float32" else 0.05 * float(whole.abs().max())
    prefix = layout(packed(layout(x[:, :5]), cache))
    assert (prefix - whole[:, :5]).abs().max() < allowed
    for t in range(5, 50):
        step = layout(packed(layout(x[:, t : t + 1]), cache))
        assert (step - whole[:, t : t + 1]).abs().max() < allowed, t


def test_a_result_is_the_caller_s_to_keep() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20, batch_first=True), 2).eval()
    packed = CachedDecoder.from_torch(theirs).packed()
    cache = packed.start(torch.randn(1, 4, 16))
    x = torch.randn(1, 3, 16)
    kept = [packed(x[:, t : t + 1], cache) for t in range(3)]
    copies = [part.clone() for part in kept]
    packed(x[:, :1], cache)
    assert all(map(torch.equal, kept, copies))


def test_training_after_packing_is_noticed() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20, dropout=0), 2)
    packed = CachedDecoder.from_torch(theirs).packed()
    memory = torch.randn(4, 1, 16)
    cache = packed.start(memory)
    with torch.no_grad():
        theirs.layers[1].linear2.weight.add_(1)
    with pytest.raises(RuntimeError, match="packed"):
        packed(torch.randn(1, 1, 16), cache)
    with pytest.raises(RuntimeError, match="packed"):
        packed.start(memory)


def test_what_cannot_be_packed_is_named() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20), 2).eval()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.in_proj_weight is float64"):
        CachedDecoder.from_torch(theirs.double()).packed()


def test_active_dropout_is_refused() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20), 2)
    packed = CachedDecoder.from_torch(theirs).packed()
    cache = packed.start(torch.randn(4, 1, 16))
    with pytest.raises(RuntimeError, match="dropout"):
        packed(torch.randn(1, 1, 16), cache)


def test_a_spec_says_how_to_keep_what_is_decoded() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20), 2).eval()
    packed = CachedDecoder.from_torch(theirs).packed()
    cache = packed.start(torch.randn(4, 1, 16), None, CacheSpec(kind="static", capacity=3, beams=2))
    assert (cache.spec.kind, cache.spec.capacity, cache.rows) == ("static", 3, 2)
    with pytest.raises(TypeError, match="a spec and beams"):
        packed.start(torch.randn(4, 1, 16), None, CacheSpec(), beams=2)


# -- what a replay would miss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_was_left_open_never_happened(kind: str) -> None:
    engine = PackedEngine(tiny_model())
    spec = CacheSpec(kind=kind, capacity=30)
    ids, hidden = sources([5, 3])
    memory = engine.encode(ids, hidden)
    disturbed, plain = (engine.start(memory, hidden, spec) for _ in range(2))
    for step in range(12):
        if step == 4:
            disturbed.cache.begin(3)
        if step == 6:
            disturbed.cache.rollback()
        tokens = torch.tensor([step + 5, step + 50])
        assert torch.equal(disturbed.step(tokens).logits(), plain.step(tokens).logits()), step


class EverySecond(CachedMultiheadAttention):
    """Attends at every second position only: which one, Python decides, and no operator tells."""

    def attend(self, x, step, ops, *, norm=None, dropout=None, residual=None) -> Tensor:
        attended = super().attend(x, step, ops, norm=norm, dropout=dropout, residual=residual)
        return attended if step.step.start % 2 else ops.product("out_proj", x, norm=norm, residual=residual)


def test_a_structure_whose_steps_differ_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRUCTURES, "second", EverySecond)
    model = tiny_model(attention="second")
    ids, hidden = sources([5, 3])
    plain, packed = (
        engine.start(engine.encode(ids, hidden), hidden, CacheSpec())
        for engine in (EagerEngine(model), PackedEngine(model))
    )
    for step in range(9):
        tokens = torch.tensor([step + 5, step + 50])
        expected = plain.step(tokens).logits()
        assert (packed.step(tokens).logits() - expected).abs().max() < 1e-4 * expected.abs().max(), step
