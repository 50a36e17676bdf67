"""The parity check passes where nothing is wrong, fails where something is, and would notice if it checked nothing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from translator.attention import FullPass
from translator.cache import CACHE_KINDS, DecoderCache, DynamicCache, Step, View
from translator.checkpoint import Checkpoint, CheckpointConfig
from translator.config import ModelConfig
from translator.decoder import CachedDecoder
from translator.diagnostics.parity import scenarios as scenarios_module
from translator.diagnostics.parity import self_test as self_test_module
from translator.diagnostics.parity.bench import Bench
from translator.diagnostics.parity.check import (
    DTYPES,
    LINES,
    ParityReport,
    check_parity,
    report_notes,
    report_summary,
)
from translator.diagnostics.parity.faults import CONTAINER, REQUIRED, Fault
from translator.diagnostics.parity.scenarios import Grid, run, scenarios
from translator.diagnostics.parity.searches import RecordedCacheDecoding, reference_search
from translator.diagnostics.parity.self_test import (
    FAULTS,
    WIDE,
    SelfTestReport,
    random_model,
    self_test,
    self_test_bench,
    self_test_notes,
)
from translator.diagnostics.parity.tally import Check, Tally
from translator.errors import UserError
from translator.model import TranslationModel
from translator.tokenizer import Tokenizer

FP64 = torch.float64
BY_NAME = {fault.name: fault for fault in FAULTS}
# Caught by what it raises or by NaN, where numbers alone would show nothing.
WITHOUT_NUMBERS = {"mask made from the step's length alone"}
BY_REFERENCE = {"indirect", "paged"}
# What only a container can have that moves keys and values: one of references has the faults of its table instead.
MOVING = {
    "reorder of keys alone",
    "reorder skipped in the last layer",
    "rows expanded as a block",
    "stale rows after crop",
}


def can_have(kind: str, fault: Fault) -> bool:
    container = CACHE_KINDS[kind]
    if fault.growing and container.needs_capacity:
        return False
    return fault.by_reference in (None, kind in BY_REFERENCE) and issubclass(container, fault.container)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def report() -> SelfTestReport:
    return self_test()


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    tokenizer = Tokenizer.train(LINES * 4, 330)
    config = ModelConfig(
        vocab_size=330, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=24,
        max_positions=40, activation="gelu", positions="sinusoidal",
    )  # fmt: skip
    torch.manual_seed(0)
    model = TranslationModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.4)
    return Checkpoint(model, tokenizer, CheckpointConfig(source_language="en", target_language="zh", model=config))


@pytest.fixture(scope="module")
def parity(checkpoint: Checkpoint) -> ParityReport:
    return check_parity(checkpoint, max_tokens=16)


def check(bench: Bench, kind: str, name: str) -> Check:
    tally = Tally()
    run(scenarios(CACHE_KINDS, bench.beams)[kind, name], bench, tally)
    return Check(FP64, kind, name, tally)


# -- the clean run ----------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("seed", [3, 6])
def test_random_models_pass_in_every_scenario_and_container(seed: int) -> None:
    bench = self_test_bench(random_model(seed))
    for kind, name in scenarios(CACHE_KINDS, bench.beams):
        result = check(bench, kind, name)
        assert (result.verdict, result.tally.errors) == ("pass", []), (kind, name)
        assert result.tally.positions > 30 or result.tally.searches == 6
        assert result.tally.largest <= 1e-10
        assert result.tally.scale > 5  # weights large enough for faults to show


def test_scenarios_cover_every_container() -> None:
    names = {kind: {name for own, name in scenarios(CACHE_KINDS, 4) if own == kind} for kind in CACHE_KINDS}
    assert set(names) == {"dynamic", "indirect", "static"} | set(CACHE_KINDS)
    assert all(own == {"given tokens", "life of a grid", "greedy", "beam 4"} for own in names.values())


def test_searches_of_the_random_model_end_at_different_steps_and_some_by_the_end_token() -> None:
    bench = self_test_bench(random_model())
    for beams in (1, 3):
        found = [h for hypotheses in reference_search(bench, "torch", beams).found for h in hypotheses]
        assert len({len(h.tokens) for h in found}) >= 4
        assert {h.finished for h in found} == {True, False}


@pytest.mark.numeric
def test_parity_of_a_checkpoint(parity: ParityReport) -> None:
    assert parity.passed
    assert parity.sentences == len(LINES)
    assert {check.dtype for check in parity.checks} == set(DTYPES)
    assert {check.kind for check in parity.checks} == {"-", *CACHE_KINDS}
    assert all(check.tally.positions > 0 or check.tally.searches > 0 for check in parity.checks)
    for check in parity.checks:
        if check.dtype == torch.float32:
            assert check.tally.largest <= 1e-4 * check.tally.scale
        assert (check.verdict == "reported") == (check.dtype == torch.bfloat16)


@pytest.mark.numeric
def test_report_ends_with_a_count(parity: ParityReport) -> None:
    """Of what is decided on, and of what was given: the same on every machine, whatever its searches produce."""
    judged = sum(check.dtype != torch.bfloat16 for check in parity.checks)
    positions, searches = given_in_advance(sentences=12, longest=16, beams=4)
    assert report_summary(parity) == (
        f"parity: {2 * positions:,} positions and {2 * searches:,} searches, {judged} of {judged} checks passed"
    )


def given_in_advance(sentences: int, longest: int, beams: int) -> tuple[int, int]:
    """Positions of given tokens and searches of one type, by the scripts in `scenarios` alone."""
    given = sentences * longest
    life = 2 * (_grown_and_cut(beams) + _reused(beams))  # in views of two kinds
    whole, later = given, given // 2
    searches = 2 * sentences
    return whole + later + len(CACHE_KINDS) * (3 * given + life), searches + len(CACHE_KINDS) * searches


def _grown_and_cut(beams: int) -> int:
    return 4 * 2 + 4 * beams * (1 + 1 + 3) + 3 * beams * (1 + 2 + 1 + 1 + 1) + beams


def _reused(beams: int) -> int:
    return 3 * beams * (1 + 3 + 1 + 2 + 1 + 3 + 4 + 3 + 1 + 2 + 1) + 3 + beams


@pytest.mark.numeric
def test_given_lines_blank_ones_and_more_than_a_batch(checkpoint: Checkpoint) -> None:
    done: list[tuple[int, int]] = []
    lines = ["", "Yes.", *LINES]
    report = check_parity(
        checkpoint, lines, kinds=["static"], beam_size=3, max_tokens=6, progress=lambda *now: done.append(now)
    )
    assert report.passed
    assert report.sentences == len(lines)
    assert {check.kind for check in report.checks} == {"-", "static"}
    assert done[-1][0] == done[-1][1] == len(done)


def test_one_line_gets_company(checkpoint: Checkpoint) -> None:
    report = check_parity(checkpoint, ["Yes."], kinds=["dynamic"], beam_size=3, max_tokens=4)
    assert report.passed
    assert report.sentences == 1 + len(LINES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 2}, "beam of 3"),
        ({"kinds": ["elastic"]}, "unknown cache kind 'elastic'"),
        ({"max_tokens": 1}, "targets of 2 tokens"),
    ],
)
def test_what_cannot_be_checked_is_refused(checkpoint: Checkpoint, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_parity(checkpoint, **options)


def test_the_model_is_left_as_it_was(checkpoint: Checkpoint, parity: ParityReport) -> None:
    assert checkpoint.model.embedding.weight.dtype == torch.float32


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_self_test_passes(report: SelfTestReport) -> None:
    assert report.passed, str(report)
    assert len(FAULTS) == len(BY_NAME) >= 50
    planted = {kind: [o.fault.name for o in report.outcomes if o.kind == kind] for kind in CACHE_KINDS}
    assert planted == {kind: [fault.name for fault in FAULTS if can_have(kind, fault)] for kind in CACHE_KINDS}
    table = set(planted["indirect"]) - set(planted["dynamic"])
    assert len(table) >= 10 and set(planted["dynamic"]) - set(planted["indirect"]) == MOVING
    largest = max(check.tally.largest for check in report.clean)
    each = ", ".join(f"{kind} {len(names)}" for kind, names in planted.items())
    total = sum(map(len, planted.values()))
    assert str(report).split("\n")[-1] == (
        f"self-test: {total} of {total} planted faults caught ({each}), clean run passed (max |Δlogit| {largest:.1e})"
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_fault_is_caught_by_a_wide_margin_in_every_container(report: SelfTestReport, name: str) -> None:
    outcomes = [outcome for outcome in report.outcomes if outcome.fault.name == name]
    assert [o.kind for o in outcomes] == [kind for kind in CACHE_KINDS if can_have(kind, BY_NAME[name])] != []
    for outcome in outcomes:
        assert outcome.caught
        assert outcome.fault.description
        if name in WITHOUT_NUMBERS:
            assert outcome.error
        else:
            assert outcome.size >= 1000 * WIDE


@pytest.mark.parametrize("name", REQUIRED)
def test_self_test_fails_without_a_required_fault_in_one_container(report: SelfTestReport, name: str) -> None:
    last = [outcome for outcome in report.outcomes if outcome.fault.name == name][-1]
    rest = [outcome for outcome in report.outcomes if outcome is not last]
    assert SelfTestReport(report.clean, [*rest, last], report.inapplicable).passed
    short = SelfTestReport(report.clean, rest, report.inapplicable)
    assert not short.passed
    assert f"not planted: {name}" in self_test_notes(short)


def test_self_test_fails_when_a_fault_is_missed(report: SelfTestReport) -> None:
    harmless = Fault("harmless", "nothing", DecoderCache, "positions", lambda original, *args: original(*args))
    missed = self_test(faults=[harmless])
    assert [outcome.caught for outcome in missed.outcomes] == [False] * len(CACHE_KINDS)
    assert not SelfTestReport(report.clean, [*report.outcomes, *missed.outcomes], report.inapplicable).passed
    none = ", ".join(f"{kind} 0" for kind in CACHE_KINDS)
    assert f"self-test: 0 of {len(CACHE_KINDS)} planted faults caught ({none}), clean run passed" in str(missed)
    assert f"MISSED: {', '.join(CACHE_KINDS)}" in str(missed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_a_planted_fault_is_gone_afterwards(fault: Fault, kind: str) -> None:
    owner = CACHE_KINDS[kind] if fault.owner is CONTAINER else fault.owner
    others = [other for other in CACHE_KINDS.values() if other is not owner]
    before, around = getattr(owner, fault.attribute), [getattr(other, fault.attribute, None) for other in others]
    with pytest.raises(KeyError), fault.planted(CACHE_KINDS[kind]):
        assert getattr(owner, fault.attribute) is not before
        assert [getattr(other, fault.attribute, None) for other in others] == around  # one container at a time
        raise KeyError
    assert getattr(owner, fault.attribute) is before


def test_a_plant_that_is_itself_broken_is_not_taken_for_a_catch() -> None:
    broken = Fault("broken", "takes no arguments", DecoderCache, "positions", lambda: None)
    with pytest.raises(TypeError):
        self_test(faults=[broken])


def test_self_test_of_a_model_with_one_layer_leaves_out_what_needs_two() -> None:
    config = ModelConfig(
        vocab_size=19, d_model=16, nhead=2, num_encoder_layers=0, num_decoder_layers=1, dim_feedforward=8,
        max_positions=20,
    )  # fmt: skip
    few = [BY_NAME["one layer's cache used for another"], BY_NAME["position off by one"]]
    report = self_test(TranslationModel(config), faults=few)
    assert {outcome.fault.name for outcome in report.outcomes} == {"position off by one"}
    assert [outcome.caught for outcome in report.outcomes] == [True] * len(CACHE_KINDS)
    with pytest.raises(UserError, match="more than 16 positions"):
        self_test(TranslationModel(ModelConfig(vocab_size=19, d_model=4, nhead=1, max_positions=16)))


def test_parity_of_a_checkpoint_fails_with_a_fault(checkpoint: Checkpoint) -> None:
    with BY_NAME["source padding forgotten after step 1"].planted(DynamicCache):
        report = check_parity(checkpoint, beam_size=3, max_tokens=8)
    assert not report.passed
    assert f" 4 of {4 + 8 * len(CACHE_KINDS)} checks passed" in report_summary(report)  # those without a cache


def test_a_container_that_forgets_is_found_by_default(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(DynamicCache):
        kind = "forgetful"

        def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
            super().append(k, torch.zeros_like(v) if step.start == 5 else v, step, view)

    monkeypatch.setitem(CACHE_KINDS, "forgetful", Forgetful)
    report = check_parity(checkpoint, beam_size=3, max_tokens=8)
    failed = {check.kind for check in report.checks if check.verdict == "FAIL"}
    assert failed == {"forgetful"}


def test_a_reference_that_looks_ahead_is_found(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CachedDecoder.run

    def sees_all(self: CachedDecoder, x: Tensor, steps: Sequence[object], *rest: object) -> Tensor:
        for step in steps:
            if isinstance(step, FullPass):
                step.is_causal = False
        return original(self, x, steps, *rest)

    monkeypatch.setattr(CachedDecoder, "run", sees_all)
    report = check_parity(checkpoint, beam_size=3, max_tokens=8)
    failed = {(check.kind, check.name) for check in report.checks if check.verdict == "FAIL"}
    assert {("-", "whole prefix"), ("-", "later tokens")} <= failed


def test_an_error_fails_the_check_and_is_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: DecoderCache, beam: Tensor) -> None:
        raise RuntimeError("no such operation\nmore")

    monkeypatch.setattr(DecoderCache, "reorder", refuses)
    report = check_parity(checkpoint, kinds=["static"], beam_size=3, max_tokens=4)
    assert not report.passed
    assert "float64, static, life of a grid: RuntimeError: no such operation" in report_notes(report)


# -- a harness that proves nothing ------------------------------------------------------------------------------------


def test_comparing_something_with_itself_counts_nothing() -> None:
    tally = Tally()
    logits = torch.randn(3, 4, 5)
    tally.compare("torch", logits[:, 1:], logits[:, 1:])
    assert tally.positions == 0
    assert Check(FP64, "dynamic", "nothing", tally).verdict == "FAIL"
    assert Check(FP64, "dynamic", "empty", Tally()).verdict == "FAIL"
    assert not ParityReport(0, []).passed


def test_a_harness_that_compares_a_cache_with_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_itself(self: Grid) -> None:
        for _, logits in self.pending:
            self.tally.compare("torch", logits, logits)
        self.pending = []

    monkeypatch.setattr(Grid, "check", with_itself)
    report = self_test(faults=[])
    assert not report.clean_passed
    assert any("given tokens: FAIL" in line for line in self_test_notes(report))


def test_a_harness_that_never_uses_the_cache_misses_faults_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {("dynamic", "given tokens"): scenarios_module.uncached_path}
    monkeypatch.setattr(self_test_module, "scenarios", lambda kinds, beams: plan)
    report = self_test(faults=[BY_NAME["past K/V ignored"], BY_NAME["reorder skipped"]])
    assert report.clean_passed
    assert [outcome.caught for outcome in report.outcomes] == [False] * 2 * len(CACHE_KINDS)
    assert not report.passed


def test_nan_is_an_infinite_difference() -> None:
    tally = Tally()
    tally.compare("torch", torch.tensor([[float("nan"), 0.0]]), torch.zeros(1, 2))
    tally.compare_scores(float("nan"), 0.0)
    assert tally.largest == tally.score_difference == float("inf")
    assert Check(torch.float32, "static", "greedy", tally).verdict == "FAIL"


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="against"):
        Tally().compare("torch", torch.zeros(1, 2), torch.zeros(2, 2))


# -- ties -------------------------------------------------------------------------------------------------------------


def twins(monkeypatch: pytest.MonkeyPatch, nudge: float, *, apart: float = 0.0) -> Bench:
    """A model whose tokens 4 to 18 come in pairs with the same logits, `apart` aside; the cache favours the other one.

    Pairs of equal logits are what a search can't choose between; `nudge` is added to the odd ones with a cache.
    """
    model = random_model()
    with torch.no_grad():
        model.embedding.weight[5::2] = model.embedding.weight[4:18:2] * (1 - apart)
    original = RecordedCacheDecoding.next_logits

    def nudged(self: RecordedCacheDecoding, tokens: Tensor) -> Tensor:
        logits = original(self, tokens).clone()
        logits[:, 5::2] += nudge
        return logits

    monkeypatch.setattr(RecordedCacheDecoding, "next_logits", nudged)
    return self_test_bench(model)


@pytest.mark.parametrize("name", ["greedy", "beam 3"])
def test_a_tie_is_reported_as_a_tie(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    result = check(twins(monkeypatch, 1e-12), "dynamic", name)
    assert result.verdict == "tie"
    assert [difference.against for difference in result.tally.differences] == ["uncached", "torch"]
    for difference in result.tally.differences:
        assert difference.gap <= 1e-11
        assert difference.token != difference.expected
        assert result.is_tie(difference)
    report = ParityReport(6, [result, check(self_test_bench(random_model()), "-", "later tokens")])
    assert report.passed
    assert report_summary(report).endswith("1 of 2 checks passed, 1 tie")
    assert any(line.endswith(": a tie") for line in report_notes(report))


@pytest.mark.parametrize("name", ["greedy", "beam 3"])
def test_other_tokens_by_more_than_a_tie_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    result = check(twins(monkeypatch, 1e-3), "dynamic", name)
    assert result.verdict == "FAIL"
    assert any(line.endswith("NOT a tie") for line in report_notes(ParityReport(6, [result])))
