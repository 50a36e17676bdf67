"""Exact mode: what is refused, and that a machine which doesn't keep the promise is noticed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import ENGLISH, tiny_checkpoint, tiny_model, tiny_translator
from translator import Translator
from translator.checkpoint import write_checkpoint
from translator.diagnostics.parity.exact import exact_parity
from translator.engine import exact
from translator.engine.eager import EagerEngine
from translator.engine.ensemble import EnsembleEngine
from translator.engine.native import operations
from translator.engine.native.library import available, supported
from translator.engine.native.operations import NativeAttention
from translator.engine.native.weights import TYPES
from translator.engine.packed import PackedEngine
from translator.engine.scores import NativeScores
from translator.errors import UserError
from translator.search import sampling

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels aren't built")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("compute_type", TYPES)
def test_this_machine_keeps_the_promise(compute_type: str) -> None:
    exact.check_exact(PackedEngine(tiny_model(), compute_type))


def test_an_ensemble_is_as_exact_as_its_members() -> None:
    one, other = PackedEngine(tiny_model()), PackedEngine(tiny_model(seed=3), "int8")
    exact.check_exact(EnsembleEngine([one, other]))
    with pytest.raises(UserError, match=r"EagerEngine .*; engine packed, on a CPU"):
        exact.check_exact(EnsembleEngine([one, EagerEngine(tiny_model())]))


def product_by_halves(native, packed, x, norm, activation, residual) -> Tensor:
    """A sum whose order depends on the number of rows."""
    y = kept_product(native, packed, x, norm, activation, residual)
    return y if x.shape[0] < 5 else y * (1 + 2**-23)


def product_by_threads(native, packed, x, norm, activation, residual) -> Tensor:
    y = kept_product(native, packed, x, norm, activation, residual)
    return y if native.threads == 1 else y * (1 + 2**-23)


def attention_to_padding(self, q, k, v, mask, is_causal=False, dropout=0.0) -> Tensor:
    return kept_attention(self, q, k, v, None, is_causal, dropout)


def another_pass(self, q, k, v, mask, is_causal=False, dropout=0.0) -> Tensor:
    if is_causal:
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).float()
    return kept_attention(self, q, k, v, mask, is_causal, dropout)


def top_of_a_batch(self, k, banned=None):
    values, ids = kept_top(self, k, banned)
    return (values, ids) if self.rows < 3 else (values + 1e-15, ids)


def noise_by_place(seeds: Tensor, steps: Tensor, tokens: Tensor) -> Tensor:
    return kept_gumbel(seeds, steps, tokens) * (1 + 2**-52 * torch.arange(len(seeds)).double().unsqueeze(1))


kept_product, kept_attention = operations.product, NativeAttention.__call__
kept_top, kept_gumbel = NativeScores.top, sampling.gumbel
FAULTS = {
    "product by halves": (exact, "product", product_by_halves, "the product .* rows on 1 threads"),
    "product by threads": (exact, "product", product_by_threads, "the product .* on 2 threads"),
    "padding seen": (NativeAttention, "__call__", attention_to_padding, "attention of 4 heads"),
    "another pass": (NativeAttention, "__call__", another_pass, "steps with a cache"),
    "top": (NativeScores, "top", top_of_a_batch, "scores of 420 tokens"),
    "noise": (exact, "gumbel", noise_by_place, "noise of 420"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_machine_that_sums_otherwise_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, said = FAULTS[fault]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(UserError, match=f"this machine doesn't keep the promise: .*{said}"):
        exact.check_exact(PackedEngine(tiny_model()))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_checkpoint())
    return tmp_path


def test_other_engines_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Translator.from_checkpoint(checkpoint, exact=True).translate(["a cup"])
    for engine, name in (("eager", "EagerEngine"), ("graphs", "GraphEngine")):
        with pytest.raises(UserError, match=f"exact mode: {name} .*; engine packed, on a CPU"):
            Translator.from_checkpoint(checkpoint, engine=engine, exact=True)
    monkeypatch.setenv("TRANSLATOR_ISA", "none")
    with pytest.raises(UserError, match="needs the native kernels, and there are none: TRANSLATOR_ISA=none"):
        Translator.from_checkpoint(checkpoint, exact=True)


@pytest.mark.parametrize("isa", supported())
def test_every_instruction_set_keeps_the_promise(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSLATOR_ISA", isa)
    torch.set_num_threads(1)
    for compute_type in TYPES:
        exact.check_exact(PackedEngine(tiny_model(), compute_type))
    own = "int8" if isa in ("amx", "avx512vnni") else "float16"
    report = exact_parity(tiny_checkpoint(), ENGLISH[:2], [1, 2], beam_size=3, compute_types=(own,))
    assert report.passed, str(report)


SCRIPT = """
import torch
torch.set_num_threads(1)
from tests.helpers import tiny_checkpoint
from translator.diagnostics.parity.exact import exact_parity
report = exact_parity(tiny_checkpoint(), ["a cup of tea", "Yes"], [1, 2], beam_size=3, compute_types=["float32"])
assert report.passed, str(report)
print(torch.backends.cpu.get_cpu_capability())
"""


def test_pytorch_of_an_older_processor_keeps_the_promise() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AVX512" not in done.stdout


def test_scores_are_the_same_beside_others() -> None:
    translator = tiny_translator(engine="packed")
    sources, targets = ENGLISH, [text[::2] for text in reversed(ENGLISH)]
    together = translator.score(sources, targets)
    assert together == [translator.score([a], [b])[0] for a, b in zip(sources, targets, strict=True)]


def test_the_self_check_takes_less_than_a_second() -> None:
    start = time.process_time()
    torch.set_num_threads(1)
    exact.check_exact(PackedEngine(tiny_model()))
    assert time.process_time() - start < 1
