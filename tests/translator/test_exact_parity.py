"""`parity --exact` passes, and would notice: faults that hang on company, planted one by one."""

import re

import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_checkpoint
from translator.diagnostics.parity.exact import exact_notes, exact_parity, exact_summary
from translator.engine.native.library import available
from translator.engine.native.operations import NativeAttention, NativeOperations
from translator.engine.scores import NativeScores
from translator.search import sampling
from translator.search.beam import Beam

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels aren't built")

LINES = ["a cup of tea, please", "Yes", "the rain stopped and nobody knows what will happen", "Where is Tom?"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compared(compute_type: str = "float32"):
    return exact_parity(tiny_checkpoint(), LINES, [3, 8, 9, 12], beam_size=3, compute_types=(compute_type,))


def test_every_way_of_decoding_is_equal() -> None:
    report = compared("int8")
    assert report.passed
    assert re.fullmatch(
        r"exact: 6 sentences, [\d,]+ positions and 72 searches, 12 of 12 checks equal to the bit", exact_summary(report)
    )


product, attention, top = NativeOperations.product, NativeAttention.__call__, NativeScores.top
drawn, choose = sampling.draw_seed, Beam.choose


def sums_by_rows(self, name: str, x: Tensor, **how) -> Tensor:
    """A product in two halves where there are many rows: another order of its sum."""
    if name != "linear2" or x.numel() // x.shape[-1] < 5:
        return product(self, name, x, **how)
    return product(self, name, x * 0.5, **how | {"residual": None}) * 2 + how["residual"] * (1 + 2**-23)


def sums_by_threads(self, name: str, x: Tensor, **how) -> Tensor:
    y = product(self, name, x, **how)
    return y if self.native.threads < 3 else y * (1 + 2**-23)


def softmax_over_padding(self, q, k, v, mask, is_causal=False, dropout=0.0) -> Tensor:
    return attention(self, q, k, v, None, is_causal, dropout)


def ties_by_rows(self, k: int, banned=None):
    values, ids = top(self, k, banned)
    return values if self.rows < 7 else values.float().double(), ids


def noise_by_slot(grid, device):
    made = by_members(grid, device)
    made.seeds += torch.arange(len(made.seeds))
    return made


by_members = sampling.Draws._of_members
FAULTS = {
    "sums by rows": (NativeOperations, "product", sums_by_rows, "one pass, together"),
    "sums by threads": (NativeOperations, "product", sums_by_threads, "3 threads"),
    "softmax over padding": (NativeAttention, "__call__", softmax_over_padding, "steps and chunks, indirect"),
    "scores by rows": (NativeScores, "top", ties_by_rows, "beam 3"),
    "noise by slot": (sampling.Draws, "_of_members", noise_by_slot, "sampling"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, red = FAULTS[fault]
    monkeypatch.setattr("translator.diagnostics.parity.exact.check_exact", lambda engine: None)
    monkeypatch.setattr(where, name, broken)
    report = compared()
    assert not report.passed
    notes = exact_notes(report)
    assert any(re.match(rf"float32, {red}: (line \d+|generated sentence \d), .*", note) for note in notes), notes
    if fault == "sums by threads":
        assert [note.split(":")[0] for note in notes] == ["float32, 3 threads"]
