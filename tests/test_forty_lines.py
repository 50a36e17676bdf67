"""`docs/forty_lines.py` keeps its promise: a prefill, single steps and steps of any length are equal to the bit."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.numeric

FILE = Path(__file__).resolve().parent.parent / "docs" / "forty_lines.py"


@pytest.fixture(scope="module")
def lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forty_lines", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_weights(lines: ModuleType) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    D, kv = lines.D, lines.H_KV * lines.D_HEAD
    return {"qkv": torch.randn(D, D + 2 * kv) * D**-0.5, "out": torch.randn(D, D) * D**-0.5}


def test_it_runs_and_says_what_a_token_takes(lines: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines.main()
    said = capsys.readouterr().out
    assert "256 bytes a token" in said and "524,288 bytes a token" in said


@pytest.mark.parametrize("S", [1, 2, 7, 15, 16, 17, 31, 33, 100, 150])
def test_prefill_is_the_last_step_to_the_bit(lines: ModuleType, S: int) -> None:
    prefill, step, _ = lines.last_rows(torch.randn(S, lines.D), random_weights(lines))
    assert torch.equal(prefill, step)


def test_steps_of_any_length_are_one_pass_to_the_bit(lines: ModuleType) -> None:
    weights, sizes = random_weights(lines), (3, 1, 14, 1, 30, 2, 1)
    x = torch.randn(sum(sizes), lines.D)
    whole, steps = lines.Cache(), lines.Cache()
    rows = lines.layer(x, whole, weights)
    assert torch.equal(rows, torch.cat([lines.layer(part, steps, weights) for part in x.split(sizes)]))
    assert torch.equal(whole.k, steps.k) and torch.equal(whole.v, steps.v)


def test_the_blocks_compute_attention(lines: ModuleType) -> None:
    q, k, v = (torch.randn(heads, T, lines.D_HEAD) for heads, T in ((lines.H, 9), (lines.H_KV, 40), (lines.H_KV, 40)))
    torch.testing.assert_close(lines.attend(q, k, v, 31), lines.plain(q, k, v, 31), atol=1e-5, rtol=1e-5)


def test_it_is_about_forty_lines() -> None:
    text = FILE.read_text(encoding="utf-8")
    part = text[text.index("import torch") : text.index("def plain")]
    assert len([line for line in part.splitlines() if line.strip()]) <= 45
