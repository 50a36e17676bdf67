"""The account of what caches take: the source text's figures, and the bytes of this project's own caches."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.helpers import tiny_checkpoint
from translator import cli
from translator.attention import STRUCTURES
from translator.cache import CACHE_KINDS, CacheSpec, DynamicCache, KeyValueState
from translator.checkpoint import write_checkpoint
from translator.config import ModelConfig
from translator.diagnostics.memory import PRESETS, account_of, memory_preset, parse_bytes
from translator.diagnostics.memory.figures import fitting, last_within
from translator.diagnostics.memory.layers import (
    Compressed,
    Kept,
    KeysAndValues,
    Latent,
    Nothing,
    Recurrent,
    Windowed,
    scores_matrix,
)
from translator.diagnostics.memory.own import unallocated
from translator.errors import UserError
from translator.model import TranslationModel

GB, GIB = 10**9, 2**30


# -- the source text's figures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "a_token", "length", "total"),
    [
        ("llama2-7b", 524_288, 4096, 2 * GIB),
        ("llama2-70b", 327_680, 4096, 5 * GIB // 4),
        ("llama2-70b", 327_680, 131_072, 40 * GIB),
        ("qwen3.5-moe", 20_480, 262_144, 5 * GIB),
        ("deepseek-v3", 70_272, 1, 70_272),
        ("deepseek-v4-flash", 7_584, 1_048_576, 7_952_400_384),
    ],
)
def test_presets_have_the_figures_of_the_source_text(name: str, a_token: int, length: int, total: int) -> None:
    preset = memory_preset(name)
    assert preset.rules[0].growth(preset.itemsize) == a_token
    assert preset.rules[0].nbytes(length, preset.itemsize) == total


def test_savings_are_against_what_there_would_be_without_them() -> None:
    latent, flash = PRESETS["deepseek-v3"], PRESETS["deepseek-v4-flash"]
    assert latent.without is not None and flash.without is not None
    assert latent.without.growth(2) == 4_997_120
    assert round(latent.without.growth(2) / latent.rules[0].growth(2)) == 71
    assert flash.without.growth(2) == 44_032
    assert flash.rules[0].growth(2) / 1024 == Fraction(2) + Fraction(21, 4) + Fraction(20, 128) == Fraction("7.40625")


def test_windows_charged_in_full_or_as_they_are() -> None:
    full, filled = (rule.nbytes(1_048_576, 2) for rule in PRESETS["deepseek-v4-flash"].rules)
    assert (f"{full / GB:.2f}", f"{filled / GB:.2f}") == ("7.95", "5.81")
    assert full - filled == 2 * (1_048_576 - 127) * 1024


def test_weights_scores_and_requests() -> None:
    seven = PRESETS["llama2-7b"]
    read = lambda length: seven.rules[0].nbytes(length, seven.itemsize)  # noqa: E731
    assert seven.weights == 13_400_000_000
    assert last_within(read, seven.weights) == 25_558
    assert read(25_558) <= seven.weights < read(25_559)
    assert scores_matrix(32, 8192) == 8_589_934_592
    assert (fitting(10 * GIB, read(4096)), fitting(10 * GB, read(4096))) == (5, 4)


@pytest.mark.parametrize(
    ("kept", "formula"),
    [
        (KeysAndValues(32, 128), lambda S: 2 * 32 * 128 * S),
        (KeysAndValues(1, 128, query_heads=32), lambda S: 2 * 128 * S),
        (KeysAndValues(8, 128, query_heads=64), lambda S: 2 * 8 * 128 * S),
        (Nothing("reads another layer's"), lambda S: 0),
        (Latent(512, 64), lambda S: (512 + 64) * S),
        (Windowed(KeysAndValues(8, 128), 128), lambda S: 2 * 8 * 128 * min(S, 127)),
        (Compressed(512, 4), lambda S: 512 * (S // 4)),
        (Recurrent(32, 128, 128, 4, 8192), lambda S: 32 * 128 * 128 + 3 * 8192),
        (Nothing(), lambda S: 0),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_each_kind_of_layer_follows_its_row(kept: Kept, formula) -> None:
    for length in (0, 1, 3, 4, 126, 127, 128, 129, 4096):
        assert kept.numbers(length) == formula(length)
    # As long as nothing is dropped, whole windows grow by what is said of a token.
    assert kept.numbers(124) - kept.numbers(0) == 124 * kept.growth or kept.growth == 0


def test_heads_give_a_kind_its_name() -> None:
    found = [KeysAndValues(heads, 4, query_heads=8).kind for heads in (8, 2, 1)]
    assert found == ["multi-head", "grouped-query", "multi-query"]


# -- this project's caches --------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 19,
    "d_model": 24,
    "nhead": 4,
    "num_encoder_layers": 0,
    "dim_feedforward": 8,
    "max_positions": 96,
}


# Structures with sizes at which everything happens within 70 tokens, and stacks of several.
LAYERS: dict[str, tuple[str | dict[str, Any], ...]] = {name: (name,) * 3 for name in STRUCTURES} | {
    "chunked": ({"attention": "chunked", "window": 4}, {"attention": "chunked", "window": 80}, "chunked"),
    "compressed": (
        {"attention": "compressed", "rate": 2, "top_k": 2, "window": 3, "index_width": 4},
        {"attention": "compressed", "rate": 4, "top_k": 0, "window": 5},
        "compressed",
    ),
    "grouped": (
        {"attention": "grouped", "kv_heads": 2, "rotary": True},
        {"attention": "grouped", "kv_heads": 1},
        "grouped",
    ),
    "hybrid": ("linear", {"attention": "window", "window": 6}, "latent"),
    "shared": ("multihead", "none", "shared"),
    "shared window": ({"attention": "window", "window": 6}, "shared", "shared"),
    "window": ({"attention": "window", "window": 6, "sink": True}, {"attention": "window", "window": 1}, "window"),
}


@pytest.mark.parametrize("kind", sorted(CACHE_KINDS))
@pytest.mark.parametrize("case", sorted(LAYERS))
def test_the_account_is_the_bytes_of_a_cache(case: str, kind: str) -> None:
    config = ModelConfig(**SIZES, num_decoder_layers=3, decoder_layers=LAYERS[case])
    model = TranslationModel(config).eval()
    compared = 0
    for beams, block, dtype in ((1, 1, None), (3, 8, torch.float16)):
        spec = CacheSpec(beams=beams, block=block, dtype=dtype)
        (stack,) = account_of(unallocated(config, torch.float32), spec, [kind], 70, source_length=5).stacks
        if "account of its bytes" in stack.refused:
            pytest.skip(stack.refused)
        if stack.refused:
            with pytest.raises(NotImplementedError):
                model.start(torch.zeros(2, 5, 24), spec=stack_spec(spec, kind))
            continue
        cache = model.start(torch.zeros(2, 5, 24), spec=stack.spec)
        for T in (1, 4, 1, 26, 1, 31, 1, 5):
            model.decode(torch.zeros(2 * beams, T, dtype=torch.int64), cache)
            assert cache.nbytes == stack.nbytes(cache.length, sentences=2), (beams, cache.length)
            compared += 1
    assert compared in (0, 16)


def test_what_is_kept_once_and_read_twice() -> None:
    config = ModelConfig(**SIZES, num_decoder_layers=3, decoder_layers=LAYERS["shared"])
    (stack,) = account_of(unallocated(config, torch.float32), CacheSpec(), ["dynamic"], 9, source_length=3).stacks
    assert (stack.kept(9), stack.read(9)) == (9 * 2 * 24 * 4, 2 * 9 * 2 * 24 * 4)


def test_a_window_that_is_full_is_read_and_grows_no_more() -> None:
    layers = ({"attention": "window", "window": 6},)
    config = ModelConfig(**SIZES, num_decoder_layers=1, decoder_layers=layers)
    (stack,) = account_of(unallocated(config, torch.float32), CacheSpec(), ["dynamic"], 9, source_length=3).stacks
    assert [stack.read(length) // (2 * 24 * 4) for length in (1, 4, 5, 6, 500)] == [1, 4, 5, 5, 5]
    assert stack.outweighs(10**6) is None  # no length ever does


def stack_spec(spec: CacheSpec, kind: str) -> CacheSpec:
    return CacheSpec(kind=kind, capacity=70, beams=spec.beams, block=spec.block, dtype=spec.dtype)


def test_a_container_that_says_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicCache, "first_slots", 16)  # what a cache made from now on begins with
    monkeypatch.setattr(DynamicCache, "slots_for", classmethod(lambda cls, spec, length: max(length, 1)))
    with pytest.raises(AssertionError):
        test_the_account_is_the_bytes_of_a_cache("multihead", "dynamic")


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "deepseek-v3"])
def test_large_presets_are_the_bytes_of_containers_without_storage(name: str) -> None:
    preset, length = PRESETS[name], 4096
    held = 0
    for count, kept in preset.rules[0].layers:
        heads, *widths = {
            "llama2-7b": (32, 128, 128), "llama2-70b": (8, 128, 128), "deepseek-v3": (1, 512, 64)
        }[name]  # fmt: skip
        state = CacheSpec(kind="static", capacity=length).key_value_state(
            1, heads, widths[0], value_width=widths[1], dtype=torch.bfloat16, device=torch.device("meta")
        )
        assert state.nbytes == kept.numbers(length) * 2
        held += count * state.nbytes
    assert held == preset.rules[0].nbytes(length, preset.itemsize)


def test_a_container_without_an_account_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(DynamicCache):
        kind = "silent"
        account = classmethod(KeyValueState.account.__func__)  # type: ignore[attr-defined]

    monkeypatch.setitem(CACHE_KINDS, "silent", Silent)
    model = unallocated(ModelConfig(**SIZES, num_decoder_layers=1), torch.float32)
    silent, dynamic = account_of(model, CacheSpec(), ["silent", "dynamic"], 9, source_length=3).stacks
    assert silent.refused == "cache kind 'silent' gives no account of its bytes"
    assert not dynamic.refused


def test_what_a_step_reads_of_the_model() -> None:
    config = ModelConfig(**SIZES, num_decoder_layers=2)
    D, F, V = 24, 8, 19
    layer = (3 * D * D + 3 * D) + 2 * (D * D + D) + (D * D + D) + (D * F + F) + (F * D + D) + 3 * 2 * D
    account = account_of(unallocated(config, torch.float32), CacheSpec(), [], 9, source_length=3)
    assert account.weights == 4 * (2 * layer + 2 * D + V * D)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [("10GiB", 10 * GIB), ("10 gb", 10 * GB), ("13.4GB", 13_400_000_000), ("512", 512), ("1.5KiB", 1536)],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text, "--budget") == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "10 Gibi", "1e9", "1,000", "٣GB", "9" * 99])
def test_a_size_that_is_none_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget .*write a size as 10GiB"):
        parse_bytes(text, "--budget")


def run(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["memory", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_both_ways_to_count_are_printed_with_their_rule() -> None:
    said = " ".join(run("--preset", "deepseek-v4-flash").split())
    assert "windows charged in full, as the source text does 7,584 1,048,576 7,952,400,384 7.95 7.41" in said
    assert "windows hold W - 1 = 127 tokens 7,584 1,048,576 5,805,176,832 5.81 5.41" in said
    assert "inf" not in said and "not applicable" in said


def test_requests_in_a_budget() -> None:
    for budget, fit in (("10GiB", 5), ("10GB", 4)):
        words = run("--preset", "llama2-7b", "--budget", budget).splitlines()[2].split()
        assert words[-2:] == [str(fit), "25,558"]
    words = run("--preset", "llama2-7b", "--weights", "0.5MB").splitlines()[2].split()
    assert words[-1] == "0"  # the first token already takes more


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tiny_checkpoint())
    return folder


def test_a_checkpoint_of_ones_own(checkpoint: Path, tmp_path: Path) -> None:
    picture, figures = tmp_path / "memory.png", tmp_path / "memory.json"
    said = run(
        "--checkpoint", str(checkpoint), "--length", "90", "--budget", "1MiB", "--beams", "2", "--source-length", "7",
        "--plot", str(picture), "--json", str(figures),
    )  # fmt: skip
    (found,) = json.loads(figures.read_text())
    # 2 layers of 2 · 32 numbers of 4 bytes a token and row; room doubles from 32 slots to 128.
    a_token = 2 * 2 * 32 * 4
    source = 7 * a_token
    assert found["containers"]["dynamic"]["read"] == 2 * 90 * a_token
    assert found["containers"]["dynamic"]["bytes"] == 2 * 128 * a_token + source
    assert found["containers"]["static"]["bytes"] == 2 * 90 * a_token + source
    assert found["containers"]["static"]["fit"] == 2**20 // (2 * 90 * a_token + source)
    assert f"{2 * 128 * a_token + source:,}" in said
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--preset", "gpt"], "known: llama2-7b"),
        (["--preset", "llama2-7b", "--cache", "dynamic"], "not both"),
        (["--cache", "nonesuch"], "unknown kind; known: dynamic"),
        (["--attention", "nonesuch"], "unknown structure; known:"),
        (["--dtype", "int4"], "one of float32"),
        (["--plot", "x.gif"], "picture's name"),
        (["--budget", "much"], "write a size"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, checkpoint: Path) -> None:
    where = [] if "--preset" in words else ["--checkpoint", str(checkpoint)]
    with pytest.raises(UserError, match=told):
        CliRunner().invoke(cli.app, ["memory", *words, *where], catch_exceptions=False)
