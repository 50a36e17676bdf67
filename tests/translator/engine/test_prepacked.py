"""The forms that stand in for the native kernels where there are none."""

import copy
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import tiny_model
from translator import CachedDecoder
from translator.cache import CacheSpec
from translator.engine import prepacked
from translator.engine.eager import EagerEngine
from translator.engine.engines import make_engine
from translator.engine.native import library
from translator.errors import UserError


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, library.WITHOUT)
    prepacked.say_once.cache_clear()


@pytest.mark.parametrize(("compute_type", "allowed"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-1)])
def test_float_types_are_close_to_the_plain_engine(compute_type: str, allowed: float) -> None:
    model = tiny_model()
    engine, plain = make_engine(model, "packed", compute_type), EagerEngine(model)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mine, theirs = engine.encode(ids), plain.encode(ids)
    assert (mine - theirs).norm() < allowed * theirs.norm()
    decodings = [each.start(theirs, None, CacheSpec(beams=2)) for each in (engine, plain)]
    for _ in range(3):
        one, other = (decoding.step(torch.tensor([7, 8, 9, 10])).logits() for decoding in decodings)
        assert (one - other).norm() < allowed * other.norm()


def test_int8_products_are_exact_sums_of_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(7, 12, generator=generator), torch.randn(7, generator=generator)
    weight[3] = 0
    (form,) = prepacked.forms({"a": (weight, bias)}, "int8").values()
    x = torch.randn(2, 3, 12, generator=generator)
    x[1, 1] = 0
    x[0, 0] *= 1e6  # a loud row changes no other

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().amax(dim=-1, keepdim=True) / 127
        return torch.where(scale > 0, (rows / scale).round() * scale, 0)

    expected = F.linear(rounded(x.double()), rounded(weight.double()), bias.double())
    assert (form(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(form(x)[0, 1:], form(x[:, 1:])[0])


def test_a_decoder_of_ones_own_says_once_that_kernels_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 20, activation=F.silu), 2).eval()
    decoder = CachedDecoder.from_torch(theirs)
    memory, x = torch.randn(5, 2, 16), torch.randn(6, 2, 16)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        packed = decoder.packed("float32")
        decoder.packed("int8")
        cache, plain = packed.start(memory), decoder.start(memory)
        for t in range(6):
            assert torch.allclose(packed(x[t : t + 1], cache), decoder(x[t : t + 1], plain), atol=1e-5)
        theirs.layers[0].linear1.weight.mul_(2)
    assert [record.message for record in caplog.records] == [
        "no native kernels (TRANSLATOR_ISA=none): PyTorch does their work, slower"
    ]
    with pytest.raises(RuntimeError, match="packed"):
        packed(x[:1], cache)


def test_weights_that_no_type_holds_are_refused() -> None:
    with pytest.raises(UserError, match="weight a: holds a number that is not finite"):
        prepacked.forms({"a": (torch.full((2, 2), 1e6), None)}, "float16")


def test_the_command_line_works_and_says_which_it_uses() -> None:
    root = Path(__file__).resolve().parents[3]
    for words, expected in ((["--version"], "no native kernels"), (["translate", "Thank you."], "谢谢")):
        done = subprocess.run(
            [sys.executable, "-m", "translator", *words],
            cwd=root, env={"PATH": "", library.VARIABLE: library.WITHOUT}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 and expected in done.stdout, done.stderr


def test_training_after_packing_is_noticed() -> None:
    model = copy.deepcopy(tiny_model())
    engine = make_engine(model, "packed", "int8")
    ids = torch.tensor([[5, 6, 7]])
    engine.encode(ids)
    model.encoder.layers[0].linear1.weight.data.mul_(2)
    engine.encode(ids)  # through `data` nothing can be noticed
    with torch.no_grad():
        model.encoder.layers[0].linear1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed since they were packed"):
        engine.encode(ids)
