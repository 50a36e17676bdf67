"""Tables in places of any width: no figure and no word is lost or broken."""

import io

import pytest
import torch
from rich.console import Console
from rich.table import Table

from tests.helpers import tiny_model
from translator import console
from translator.diagnostics.latency.arms import LatencySettings
from translator.diagnostics.latency.report import ArmLatency, LatencyReport, latency_table
from translator.diagnostics.parity.check import ParityReport, report_table
from translator.diagnostics.parity.faults import Fault
from translator.diagnostics.parity.self_test import FAULTS, FaultOutcome, SelfTestReport, self_test_table
from translator.diagnostics.parity.tally import Check, Tally
from translator.tables import fitted, natural_width

WIDTHS = [20, 30, 40, 50, 60, 70, 80, 100, 120, 200, 400]


def some_checks() -> list[Check]:
    return [
        Check(
            dtype,
            kind,
            name,
            Tally({"uncached": 1.2345e-14, "torch": 6.7e-3}, {"uncached": 18_408, "torch": 1_234_567}, 12.0),
        )
        for dtype in (torch.float64, torch.bfloat16)
        for kind in ("dynamic", "static")
        for name in ("given tokens", "life of a grid")
    ]


def planted() -> SelfTestReport:
    outcomes = [FaultOutcome(fault, kind, some_checks()) for fault in FAULTS for kind in ("dynamic", "static")]
    outcomes[0].checks[0].tally.errors.append("UnsupportedCacheOperation: no such operation")
    return SelfTestReport(some_checks(), outcomes)


def latencies() -> LatencyReport:
    arms = {
        name: ArmLatency(name, [0.75 + n, 0.5 + n], [[1.5 + n] * 40, [2.5 + n] * 40], [80.0, 90.0], [1.25 - n / 2] * 40)
        for n, name in enumerate(("none", "dynamic", "static", "torch"))
    }
    config = tiny_model().config
    names = ("d_model", "nhead", "dim_feedforward", "num_decoder_layers", "vocab_size")
    machine = {"cpu": "A Processor With A Very Long Name @ 3.00GHz" * 2, "threads": 1, "torch": "2.13.0"}
    return LatencyReport(LatencySettings(tokens=40), {name: getattr(config, name) for name in names}, machine, arms, 0)


TABLES = {
    "parity": lambda: report_table(ParityReport(6, some_checks())),
    "self-test": lambda: self_test_table(planted()),
    "profile": lambda: latency_table(latencies()),
}


def printed(table: Table, width: int) -> list[str]:
    found = fitted(table, width)
    if isinstance(found, list):
        return found
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(found)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_no_figure_and_no_ordinary_word_is_lost_or_broken_at_any_width(name: str, width: int) -> None:
    table = TABLES[name]()
    lines = printed(table, width)
    words = [word.rstrip(":") for line in lines for word in line.split()]
    wanted = [str(column.header) for column in table.columns] + [
        str(c) for column in table.columns for c in column.cells
    ]
    pieces = [word.rstrip(":") for text in wanted for word in text.split()]
    for word in {word for word in pieces if len(word) <= 16}:
        here = pieces.count(word)
        assert words.count(word) >= here, f"{word!r} is there {words.count(word)} times, not {here}"


@pytest.mark.parametrize("name", TABLES)
def test_at_80_columns_every_line_fits_and_is_a_table(name: str) -> None:
    table = TABLES[name]()
    assert isinstance(fitted(table, 80), Table)
    lines = printed(table, 80)
    assert max(map(len, lines)) <= 80
    assert "".join(sorted("".join(lines).replace(" ", ""))) == "".join(
        sorted(
            "".join(
                [*(str(c.header) for c in table.columns), *(str(x) for c in table.columns for x in c.cells)]
            ).replace(" ", "")
        )
    )


@pytest.mark.parametrize("name", TABLES)
def test_where_there_is_room_every_row_is_one_line(name: str) -> None:
    table = TABLES[name]()
    lines = printed(table, natural_width(table))
    assert len(lines) == table.row_count + 1
    assert [line.split()[0] for line in lines[1:]] == [str(cell).split()[0] for cell in table.columns[0].cells]


def row(table: Table, number: int) -> dict[str, str]:
    return {str(column.header): str(list(column.cells)[number]) for column in table.columns}


def test_rows_become_columns_with_their_own_figures() -> None:
    lines = printed(latency_table(latencies()), 60)
    assert lines[0].split() == ["arm", "none", "dynamic", "static", "torch"]
    by_name = {" ".join(line.split()[:-4]): line.split()[-4:] for line in lines[1:] if len(line.split()) > 4}
    assert by_name["start ms"] == ["0.62", "1.62", "2.62", "3.62"]
    assert by_name["first token ms"] == ["2.00", "3.00", "4.00", "5.00"]


def test_too_narrow_for_any_table_a_row_is_a_list() -> None:
    lines = printed(report_table(ParityReport(6, some_checks())), 30)
    assert lines[0] == "type: float64" and "  compared: 18,408 positions" in lines and "  verdict: FAIL" in lines


def test_what_looks_like_markup_is_text() -> None:
    table = Table()
    table.add_column("fault [x]")
    table.add_row("[bold]reset[/] of [1, 2]")
    assert [line.strip() for line in printed(table, 80)] == ["fault [x]", "[bold]reset[/] of [1, 2]"]


@pytest.mark.parametrize("name", TABLES)
def test_a_pipe_gets_the_whole_table(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = TABLES[name]()
    console.show(table, ["note [1]: " + "x" * 300])
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "note [1]: " + "x" * 300
    titles = str(table.title).count("\n") + 1 if table.title else 0
    assert len(out) == titles + 1 + table.row_count + 1


def test_what_is_shown_aside_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console.show(latency_table(latencies()), ["note"], aside=True)
    out, err = capsys.readouterr()
    assert out == "" and "first token ms" in err and "note" in err


def test_the_faults_have_names() -> None:
    assert all(isinstance(fault, Fault) and fault.name for fault in FAULTS)
