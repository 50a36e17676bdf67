"""Every figure that a table prints stands under the heading that says what it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF
from typer.testing import CliRunner

from translator import cli
from translator.cache import DecoderCache
from translator.diagnostics.latency.profile import LatencySettings
from translator.diagnostics.latency.report import ArmLatency, LatencyReport, latency_table
from translator.diagnostics.parity.check import ParityReport, report_summary, report_table
from translator.diagnostics.parity.faults import Fault
from translator.diagnostics.parity.self_test import FaultOutcome, SelfTestReport, self_test_summary, self_test_table
from translator.diagnostics.parity.tally import Check, Tally


def rows(table: Table) -> Iterator[dict[str, str]]:
    headings = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield dict(zip(headings, map(str, cells), strict=True))


def arm(name: str, *, start: float, scale: float) -> ArmLatency:
    """Three repeats of 40 tokens: token t takes `scale * t`, the slowest repeat a tenth more."""
    tokens = [[scale * t * factor for t in range(1, 41)] for factor in (1.0, 0.9, 1.1)]
    return ArmLatency(name, [start, start - 0.25, start + 3], tokens, [900.0] * 3)


def test_the_latency_table() -> None:
    none, static = arm("none", start=0.0, scale=2.0), arm("static", start=7.0, scale=0.5)
    none.start_samples = [0.0] * 3
    static.cache_bytes = 1_250_000
    for one in (none, static):
        one.ratio = [mine / theirs for mine, theirs in zip(one.cumulative_ms, none.cumulative_ms, strict=True)]
    sizes = {"d_model": 8, "nhead": 2, "num_decoder_layers": 3, "dim_feedforward": 16, "vocab_size": 99}
    machine = {"cpu": "a processor", "threads": 1, "torch": "2.13.0"}
    report = LatencyReport(
        LatencySettings(tokens=40, repeats=3, arms=("none", "static")),
        sizes,
        machine,
        {"none": none, "static": static},
        0,
    )
    first, second = rows(latency_table(report))

    def cumulative(tokens: int) -> float:
        """2 ms a token and position without a cache."""
        return 2.0 * tokens * (tokens + 1) / 2

    assert first == {
        "arm": "none",
        "start ms": "0.00",
        "first token ms": "2.00",
        "later tokens ms": "42.00",  # tokens 2 to 40: the median is token 21
        "p95 ms": "46.20",
        "last ÷ first tenth": "13.00",  # 38, 39, 40 to 2, 3, 4
        "all ms": "1640.0",
        "ratio at 1": "1.000",
        "ratio at 2": "1.000",
        "ratio at 4": "1.000",
        "ratio at 28": "1.000",
        "ratio at 40": "1.000",
        "ahead from": "",
        "cache MB": "",
    }
    ratios = {t: (7 + cumulative(t) / 4) / cumulative(t) for t in (1, 2, 4, 28, 40)}
    assert second == {
        "arm": "static",
        "start ms": "7.00",
        "first token ms": "0.50",
        "later tokens ms": "10.50",
        "p95 ms": "11.55",
        "last ÷ first tenth": "13.00",
        "all ms": "417.0",
        **{f"ratio at {t}": f"{ratio:.3f}" for t, ratio in ratios.items()},
        "ahead from": "3",  # 7 + 0.5 + 1 + 1.5 = 10 after 12
        "cache MB": "1.25",
    }
    assert len({*second.values()}) == len(second), "no two figures are the same, so none can stand for another"


def checks() -> list[Check]:
    searched = Tally({"uncached": 3e-13}, {}, 2.0, 1e-11, searched={"uncached": 12, "torch": 11})
    given = Tally({"uncached": 1.25e-12, "torch": 6e-12}, {"uncached": 1152, "torch": 1064}, 12.0)
    failed = Tally({"torch": 0.5}, {"torch": 7}, 4.0, searched={"torch": 5})
    reported = Tally({"torch": 0.25}, {"torch": 300}, 5.0, searched={"torch": 200})
    return [
        Check(torch.float64, "dynamic", "greedy", searched),
        Check(torch.float32, "static", "given tokens", given),
        Check(torch.float64, "-", "whole prefix", failed),
        Check(torch.bfloat16, "static", "beam 4", reported),
    ]


def test_the_parity_table_and_its_count() -> None:
    names = ("type", "cache", "check", "compared", "max |Δlogit| uncached", "max |Δlogit| PyTorch")
    headings = (*names, "relative", "verdict")
    expected = [
        ("float64", "dynamic", "greedy", "11 searches", "3.0e-13", "-", "1.5e-13", "pass"),
        ("float32", "static", "given tokens", "1,064 positions", "1.2e-12", "6.0e-12", "5.0e-13", "pass"),
        ("float64", "-", "whole prefix", "7 positions, 5 searches", "-", "5.0e-01", "1.2e-01", "FAIL"),
        ("bfloat16", "static", "beam 4", "300 positions, 200 searches", "-", "2.5e-01", "5.0e-02", "reported"),
    ]
    report = ParityReport(12, checks())
    assert list(rows(report_table(report))) == [dict(zip(headings, row, strict=True)) for row in expected]
    # 1064 + 7 and 11 + 5: what is only reported isn't counted.
    assert report_summary(report) == "parity: 1,071 positions and 16 searches, 2 of 3 checks passed"
    assert not report.passed


def test_the_self_test_table_and_its_count() -> None:
    def planted(name: str, *tallies: Tally, kind: str = "static") -> FaultOutcome:
        fault = Fault(name, f"what {name} is", DecoderCache, "positions", lambda original, *args: None)
        return FaultOutcome(fault, kind, [Check(torch.float64, kind, "greedy", tally) for tally in tallies])

    def tally(largest: float, score: float = 0.0, *errors: str) -> Tally:
        return Tally({"torch": largest}, {"torch": 9}, 1.0, score, errors=list(errors))

    outcomes = [
        planted("seen", tally(0.5), tally(2.0, 3.0), tally(0.0)),
        planted("seen", tally(0.25), tally(0.0), kind="dynamic"),
        planted("raised", tally(0.0, 0.0, "ValueError: why")),
        planted("spoiled", tally(float("inf")), tally(float("inf"))),
        planted("missed", tally(1e-9), tally(0.0)),
        planted("missed", tally(4.0), kind="dynamic"),
    ]
    clean = [Check(torch.float64, "static", "greedy", tally(value)) for value in (3e-14, 7e-14)]
    clean.append(Check(torch.float64, "dynamic", "greedy", tally(1e-14)))
    report = SelfTestReport(clean, outcomes)
    headings = ("fault", "static max |Δ|", "dynamic max |Δ|", "checks failed", "verdict", "what is wrong")
    assert [tuple(row[name] for name in headings) for row in rows(self_test_table(report))] == [
        ("(none)", "7.0e-14", "1.0e-14", "0 of 3", "passed", "nothing: the checks as they are"),
        ("seen", "3.0e+00", "2.5e-01", "3 of 5", "caught", "what seen is"),
        ("raised", "raised", "-", "1 of 1", "caught", "what raised is"),
        ("spoiled", "NaN", "-", "2 of 2", "caught", "what spoiled is"),
        ("missed", "1.0e-09", "4.0e+00", "2 of 3", "MISSED: static", "what missed is"),
    ]
    assert self_test_summary(report) == (
        "self-test: 5 of 6 planted faults caught (static 3, dynamic 2), clean run passed (max |Δlogit| 7.0e-14)"
    )
    assert not report.passed


@pytest.mark.parametrize(("values", "expected"), [([1.0, 0.9, 0.8], 2), ([0.9, 1.1, 0.8], 3), ([0.5, 1.0], None)])
def test_ahead_from_is_the_first_token_that_stays_ahead(values: list[float], expected: int | None) -> None:
    one = arm("static", start=1.0, scale=1.0)
    one.ratio = values
    assert one.ahead_from == expected


def test_evaluate_prints_each_score_with_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "found").write_text("the cat sat on the mat\na dog barked loudly\n", encoding="utf-8")
    (tmp_path / "wanted").write_text("the cat sat on a mat\na dog barks loudly\n", encoding="utf-8")
    arguments = ["evaluate", "--hypotheses", tmp_path / "found", "--reference", tmp_path / "wanted"]
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--target-language", "en"])
    bleu, chrf = (
        metric.corpus_score(
            ["the cat sat on the mat", "a dog barked loudly"], [["the cat sat on a mat", "a dog barks loudly"]]
        ).score
        for metric in (BLEU(), CHRF())
    )
    assert abs(bleu - chrf) > 1
    first, second = result.stdout.splitlines()
    assert first.startswith(f"BLEU {bleu:.2f}  nrefs:1|case:mixed|eff:no|tok:13a")
    assert second.startswith(f"chrF {chrf:.2f}  nrefs:1|case:mixed|eff:yes|nc:6")
