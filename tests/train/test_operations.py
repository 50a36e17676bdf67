"""Fused operations give the loss and the gradients of plain PyTorch, and step aside where they can't."""

import copy
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train import operations
from train.backward import Backward
from train.batches import Batch, Encoded, collate, divided
from train.loop import uses_bfloat16
from train.loss import smoothed_cross_entropy
from train.operations import can_fuse
from translator.attention import STRUCTURES, CachedMultiheadAttention
from translator.config import ModelConfig
from translator.engine.native import library
from translator.model import TranslationModel

pytestmark = pytest.mark.numeric
needs_kernels = pytest.mark.skipif(not library.available(), reason="no native kernels")
SMOOTHING, PAD, BOS, EOS = 0.1, 0, 2, 3


def model(**changes: object) -> TranslationModel:
    """Of sizes that fill no vector."""
    torch.manual_seed(1)
    sizes: dict[str, object] = {
        "vocab_size": 53, "d_model": 24, "nhead": 3, "dim_feedforward": 41, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "max_positions": 64, "dropout": 0.0,
    }  # fmt: skip
    made = TranslationModel(ModelConfig(**(sizes | changes))).train()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # biases that are 0 and gammas that are 1 would hide what is left out
                parameter += torch.randn(parameter.shape) * 0.2
            assert parameter.requires_grad, name
    return made


def stirred(trained: TranslationModel, seed: int) -> None:
    """Moves every parameter, in place."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += torch.randn(parameter.shape, generator=draw) * parameter.std() * 0.7


def corpus() -> Encoded:
    """Sentences of one token and of many."""
    draw = torch.Generator().manual_seed(5)
    lengths = [(0, 0), (1, 0), (0, 17), (16, 3), (31, 33), (7, 8), (5, 1)]

    def ids(count: int) -> list[int]:
        return torch.randint(4, 53, (count,), generator=draw).tolist()

    return Encoded([[*ids(source), EOS] for source, _ in lengths], [ids(target) for _, target in lengths])


def batches(parts: int = 2) -> list[Batch]:
    text = corpus()
    return [collate(text, part, BOS, EOS) for part in divided(range(7), parts)]


def tokens(given: list[Batch]) -> int:
    return sum(batch.tokens for batch in given)


def gradients(trained: TranslationModel) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in trained.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def fused(trained: TranslationModel, bfloat16: bool = False, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of both batches at once."""
    backward = Backward(trained, SMOOTHING, bfloat16)
    assert backward.casts is not None
    torch.manual_seed(seed)
    try:
        return backward.run(batches(), tokens(batches())), gradients(trained)
    finally:
        backward.close()


def reference(trained: TranslationModel) -> tuple[float, dict[str, Tensor]]:
    """The same by autograd in fp64, all sentences one batch."""
    wide = copy.deepcopy(trained).double()
    wide.zero_grad()
    (batch,) = batches(1)
    hidden = wide.packed(batch.source, batch.target_in, batch.source_packing, batch.target_packing)
    loss = smoothed_cross_entropy(wide.logits(hidden), batch.target_out, SMOOTHING) / batch.tokens
    loss.backward()
    return float(loss.detach()), gradients(wide)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """How far each gradient is off, as a part of its length."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in wanted.items()}


@pytest.fixture(params=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + (request.param == "two threads"))
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_loss_and_every_gradient_are_those_of_fp64(positions: str) -> None:
    trained = model(positions=positions)
    loss, found = fused(trained)
    expected, wanted = reference(trained)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert max(distance(found, wanted).values()) < 2e-5
    assert all(grad.dtype == torch.float32 for grad in found.values())


@needs_kernels
def test_weights_that_changed_since_are_seen() -> None:
    """Copies in bf16, and views of packed weights that were made once."""
    trained = model()
    for bfloat16, limit in ((False, 2e-5), (True, 0.25)):
        backward = Backward(trained, SMOOTHING, bfloat16)
        for _ in range(2):
            loss = backward.run(batches(), tokens(batches()))
            expected, wanted = reference(trained)
            assert loss == pytest.approx(expected, rel=limit / 5)
            assert max(distance(gradients(trained), wanted).values()) < limit
            stirred(trained, 3)
        backward.close()


@needs_kernels
def test_bfloat16_is_as_close_as_autocast() -> None:
    """Over some models: a number that ReLU lets through in one of them alone moves a gradient by a few percent."""
    off: tuple[list[float], list[float]] = [], []
    for seed in range(12):
        trained = model()
        stirred(trained, seed)
        loss, found = fused(trained, bfloat16=True)
        expected, wanted = reference(trained)
        assert loss == pytest.approx(expected, abs=5e-3)
        plain = Backward(trained, SMOOTHING, bfloat16=True)
        plain.casts = None
        trained.zero_grad()
        plain.run(batches(1), tokens(batches()))
        for index, gradient in enumerate((found, gradients(trained))):
            off[index].extend(distance(gradient, wanted).values())
    assert statistics.median(off[0]) < 1.2 * statistics.median(off[1])


@needs_kernels
def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    """The slope along the gradient of some parameters is the change of the loss along it, under the same masks."""
    trained = model(dropout=0.3, d_model=48, positions="learned")
    _, slopes = fused(trained, seed=4)
    for part in ("embedding", "source_positions", "target_positions", "encoder", "decoder"):
        way = {name: grad for name, grad in slopes.items() if name.startswith(part)}
        length = sum(float(grad.square().sum()) for grad in way.values()) ** 0.5
        changed = []
        for step in (1e-2, -1e-2):
            moved = copy.deepcopy(trained)
            with torch.no_grad():
                for name, parameter in moved.named_parameters():
                    if name in way:
                        parameter += step / length * way[name]
            changed.append(fused(moved, seed=4)[0])
        assert (changed[0] - changed[1]) / 2e-2 == pytest.approx(length, rel=2e-2), part


@needs_kernels
def test_the_generator_alone_decides_what_is_dropped() -> None:
    trained = model(dropout=0.3)
    first, again, other = (fused(trained, seed=seed) for seed in (1, 1, 2))
    assert first[0] == pytest.approx(again[0], rel=1e-5)
    assert max(distance(first[1], again[1]).values()) < 1e-4
    assert max(distance(first[1], other[1]).values()) > 0.1
    trained.eval()  # nothing is dropped
    assert fused(trained)[0] == pytest.approx(reference(trained)[0], rel=1e-5)


@needs_kernels
def test_batches_in_another_division_give_the_same() -> None:
    trained = model()
    wanted = reference(trained)[1]
    for parts in (1, 3, 7):
        backward = Backward(trained, SMOOTHING, bfloat16=False)
        backward.run(batches(parts), tokens(batches()))
        backward.close()
        assert max(distance(gradients(trained), wanted).values()) < 2e-5


# -- where they can't -------------------------------------------------------------------------------------------------


class Other(CachedMultiheadAttention):
    """A structure that fused operations know nothing of."""


@pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"attention": "other"}], ids=str)
def test_another_activation_or_structure_is_trained_in_plain_pytorch(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRUCTURES, "other", Other)
    trained = model(**changes)
    assert not can_fuse(trained, torch.float32)
    check_plain(trained)


def check_plain(trained: TranslationModel) -> None:
    backward = Backward(trained, SMOOTHING, bfloat16=False)
    assert backward.casts is None and backward.parts(100_000) == 1
    loss = backward.run(batches(1), tokens(batches()))
    expected, wanted = reference(trained)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert max(distance(gradients(trained), wanted).values()) < 1e-4


def test_without_kernels_plain_pytorch_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, library.WITHOUT)
    check_plain(model())


def test_what_can_be_fused() -> None:
    there = library.available()
    assert can_fuse(model(), torch.float32) == there == can_fuse(model(), torch.bfloat16)
    assert not can_fuse(model(), torch.float16)
    assert not can_fuse(model().double(), torch.float32)
    dropping = model()
    dropping.decoder.stack[0].self_attn.dropout = 0.1
    assert not can_fuse(dropping, torch.float32)
    trained = model()
    trained.encoder.stack[1].activation = F.silu
    assert not can_fuse(trained, torch.float32)


@needs_kernels
def test_a_product_that_is_not_there_is_refused() -> None:
    """Rather than computed without what was asked for."""
    trained = model(dropout=0.3)
    made = operations.FusedModel(trained, operations.Casts(trained, torch.float32), seed=1)
    layer = made.encoder.layers[0]
    x = torch.randn(1, 5, 24)
    with pytest.raises(ValueError, match="dropout"):
        layer.product("linear1", x, dropout="dropout")
    with pytest.raises(ValueError, match="residual"):
        layer.of("self_attn").product("out_proj", x, activation=F.relu, residual=x)


# -- which precision a run takes by itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("products", [False, True])
def test_auto_takes_bfloat16_where_processor_and_products_both_have_it(
    monkeypatch: pytest.MonkeyPatch, instructions: bool, products: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: products)
    assert uses_bfloat16("auto", torch.device("cpu")) == (instructions and products)
    assert uses_bfloat16("bfloat16", torch.device("cpu")) and not uses_bfloat16("float32", torch.device("cpu"))


def test_auto_is_float32_where_pytorch_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not uses_bfloat16("auto", torch.device("cpu"))


def test_auto_is_float32_on_a_smaller_cpu() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import torch, train.loop as l; print(l.uses_bfloat16('auto', torch.device('cpu')))"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.stdout.strip() == "False", told.stderr
