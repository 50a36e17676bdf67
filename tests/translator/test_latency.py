"""The latency profile: every token is timed, nothing else is, and all arms compute the same."""

import dataclasses
import gc
import json
import time

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from translator.cache import CACHE_KINDS
from translator.config import ModelConfig
from translator.diagnostics.latency import profile as latency
from translator.diagnostics.latency.arms import LatencySettings, known_arms, make_arms
from translator.diagnostics.latency.plot import plot
from translator.diagnostics.latency.profile import ArmsDisagree, profile_latency
from translator.diagnostics.latency.report import ArmLatency, LatencyReport, ahead_from, latency_table
from translator.diagnostics.subject import ModelSubject
from translator.errors import UserError
from translator.model import TranslationModel

TOKENS = 12
ARMS = known_arms()


@pytest.fixture(scope="module")
def model() -> TranslationModel:
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=50, d_model=32, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=64,
        max_positions=64,
    )  # fmt: skip
    return TranslationModel(config).eval()


def settings(**changes: object) -> LatencySettings:
    return LatencySettings(**{"source_length": 7, "tokens": TOKENS, "repeats": 3, "threads": 1, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report(model) -> LatencyReport:
    return profile_latency(model, settings(arms=ARMS, beams=2, batch=2))


def test_as_many_samples_as_tokens_in_every_arm(report):
    assert {"none", *CACHE_KINDS, "torch"} == {*report.arms} == {*ARMS}
    for arm in report.arms.values():
        assert [len(times) for times in arm.token_samples] == [TOKENS] * 3
        assert len(arm.start_samples) == len(arm.wall_samples) == 3
        assert len(arm.median_ms) == len(arm.p95_ms) == len(arm.cumulative_ms) == len(arm.ratio) == TOKENS
        assert all(time > 0 for times in arm.token_samples for time in times)


def test_a_slow_step_shows_at_every_token_and_in_no_start(model, monkeypatch):
    decode = model.decode

    def slow(*args):
        time.sleep(0.005)
        return decode(*args)

    monkeypatch.setattr(model, "decode", slow)
    report = profile_latency(model, settings(tokens=4, repeats=2))
    for arm in report.arms.values():
        assert all(value >= 5 for times in arm.token_samples for value in times)
        assert arm.start_ms < 5


def test_a_slow_start_shows_in_start_and_in_the_ratio_at_the_first_token(model, monkeypatch):
    start = model.start

    def slow(*args, **options):
        time.sleep(0.05)
        return start(*args, **options)

    monkeypatch.setattr(model, "start", slow)
    report = profile_latency(model, settings(tokens=3))
    assert report.arms["dynamic"].start_ms >= 50 > report.arms["dynamic"].first_token_ms
    assert report.arms["dynamic"].ratio[0] > 1.5
    assert report.arms["none"].start_ms < 5


def test_tokens_add_up_to_the_time_of_the_whole_pass(model, monkeypatch):
    decode = model.decode

    def slow(*args):
        time.sleep(0.002)
        return decode(*args)

    monkeypatch.setattr(model, "decode", slow)
    for arm in profile_latency(model, settings(repeats=2)).arms.values():
        sums = [start + sum(times) for start, times in zip(arm.start_samples, arm.token_samples, strict=True)]
        assert all(total <= wall for total, wall in zip(sums, arm.wall_samples, strict=True))
        # The best of the repeats: another process may come between two clock readings.
        assert min(wall / total for total, wall in zip(sums, arm.wall_samples, strict=True)) <= 1.1


def test_cumulative_is_start_and_the_tokens_so_far():
    arm = ArmLatency("dynamic", [4.0, 2.0, 3.0], [[1.0, 2.0, 3.0], [1.0, 1.0, 9.0], [2.0, 4.0, 5.0]], [0.0] * 3)
    assert arm.median_ms == [1, 2, 5]
    assert arm.cumulative_ms == [4, 6, 11]
    assert arm.first_token_ms == 1
    assert arm.p95_ms == [2, 4, 9]


def test_p95_is_the_nearest_rank():
    samples = [[float(value)] for value in range(1, 41)]
    assert ArmLatency("none", [0.0], samples, [0.0]).p95_ms == [38]


def test_tail_ratio_leaves_the_first_token_out_and_pairs_within_a_repeat():
    rising = [100.0, *[float(value) for value in range(10, 40)]]
    doubled = [2 * value for value in rising]
    arm = ArmLatency("none", [0.0], [rising, doubled, rising], [0.0])
    assert arm.tail_ratio == pytest.approx(38 / 11)
    assert ArmLatency("none", [0.0], [[3.0]], [0.0]).tail_ratio == 1


def test_ratios_are_paired_within_a_repeat():
    base = ArmLatency("none", [0.0] * 3, [[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]], [0.0] * 3)
    arm = ArmLatency("dynamic", [0.5, 5.0, 4.0], [[1.0, 0.0], [10.0, 0.0], [2.0, 0.0]], [0.0] * 3)
    assert latency._paired_ratio(arm, base) == [1.5, 0.75]


@pytest.mark.parametrize(
    ("ratios", "first"), [([0.9, 0.8], 1), ([1.1, 0.9], 2), ([0.9, 1.0, 0.9], 3), ([0.9, 1.1], None), ([], None)]
)
def test_ahead_from_is_where_it_stays_ahead(ratios, first):
    assert ahead_from(ratios) == first


def test_arms_take_turns():
    names = ["none", "dynamic", "static"]
    orders = [latency._turn(names, repeat) for repeat in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)


def test_arms_that_compute_something_else_are_refused(model, monkeypatch):
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda ids, *rest: decode(ids, *rest) * (1 if ids.shape[1] > 1 else -1))
    with pytest.raises(ArmsDisagree, match="'none' and 'dynamic' pick different tokens at position 2"):
        profile_latency(model, settings())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_precision_leaves_the_model_as_it_was(model, dtype):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    model.train()
    report = profile_latency(model, settings(dtype=dtype, arms=ARMS, repeats=1))
    assert model.training and gc.isenabled() and torch.get_num_threads() == threads
    assert report.settings.dtype == dtype and report.machine["threads"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.eval()


def test_all_arms_give_the_same_logits(model):
    double = TranslationModel(model.config).double().eval()
    memory = double.encode(torch.randint(0, 50, (2, 7)))
    arms = make_arms(ModelSubject(double, [[0] * 7] * 2), settings(arms=ARMS, batch=2, beams=2), memory)
    tokens = torch.randint(0, 50, (4, TOKENS))
    with torch.inference_mode():
        for arm in arms.values():
            arm.start()
        for t in range(TOKENS):
            logits = [arm.step(tokens, t) for arm in arms.values()]
            assert logits[0].shape == (4, 50)
            assert all((other - logits[0]).abs().max() < 1e-12 for other in logits[1:])


def test_json_round_trip(report):
    plain = report.to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["unit"] == "milliseconds" and plain["encoder_included"] is False
    assert plain["settings"]["tokens"] == TOKENS and plain["sizes"]["d_model"] == 32
    assert plain["machine"]["torch"] and plain["machine"]["cpu"] and plain["machine"]["date"]
    assert len(plain["arms"]["static"]["p95_ms"]) == TOKENS


def test_the_picture_is_a_png(report, tmp_path):
    plot(report, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError):
        plot(report, tmp_path / "missing" / "folder" / "latency.png")


def test_the_table_has_a_row_for_each_arm(report):
    console = Console(width=200, record=True)
    console.print(latency_table(report))
    text = console.export_text()
    assert all(name in text for name in (*ARMS, "start", "ratio at 1", "encoder not included"))


def test_without_the_uncached_arm_there_are_no_ratios(model):
    report = profile_latency(model, settings(arms=("static",), repeats=1, tokens=1))
    assert report.arms["static"].ratio == [] and report.arms["static"].ahead_from is None
    latency_table(report)
    json.dumps(report.to_json())


def test_progress_counts_every_pass(model):
    seen = []
    profile_latency(model, settings(repeats=2, warmup=2), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 9) for n in range(1, 10)]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"repeats": 0}, {"dtype": "int8"}, {"arms": ("elastic",)}, {"arms": ()}, {"capacity": TOKENS - 1}],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        settings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 65}, "tokens 65.*64 positions"),
        ({"source_length": 65}, "source_length 65"),
        ({"device": "nope"}, "nope"),
    ],
)
def test_what_the_model_or_machine_cannot_do_is_one_line(model, wrong, message):
    with pytest.raises(UserError, match=message) as error:
        profile_latency(model, settings(**wrong))
    assert "\n" not in str(error.value)


def test_settings_can_be_replaced(model):
    assert dataclasses.replace(settings(), tokens=3).tokens == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_synchronised_around_every_step(model):
    report = profile_latency(model, settings(device="cuda", repeats=2))
    for arm in report.arms.values():
        for start, times, wall in zip(arm.start_samples, arm.token_samples, arm.wall_samples, strict=True):
            assert start + sum(times) >= 0.9 * wall
