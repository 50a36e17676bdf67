"""The subcommands' common rules: `-`, files found out before the work, progress, help, samples."""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from tests.helpers import CHINESE, ENGLISH, tiny_checkpoint
from translator import __version__, cli, console
from translator.cache import CACHE_KINDS
from translator.checkpoint import write_checkpoint
from translator.commands import COMMANDS
from translator.commands.parity import _renumber, spaced
from translator.diagnostics.parity.check import ParityReport, report_notes
from translator.diagnostics.parity.tally import Check, Tally, TokenDifference
from translator.engine.native.library import available
from translator.export import export_checkpoint
from translator.pipeline import Translator

LINES = ENGLISH[:3]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, tiny_checkpoint())
    return folder


Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process, in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["translator", *(str(a).replace("{tiny}", str(tiny)) for a in arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def is_one_line(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "") and err.startswith("translator: error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.fixture(scope="session")
def expected(tiny: Path) -> str:
    return "".join(text + "\n" for text in Translator.from_checkpoint(tiny).translate(LINES))


TEXT = "".join(line + "\n" for line in LINES)
MODEL = ("--checkpoint", "{tiny}")


# -- one rule for "-" ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("-",), ("--input", "-"), (), ("-", "--output", "-"), ("--output", "-")], ids=str)
def test_a_dash_is_standard_input_and_output_of_translate(run: Run, expected: str, words: tuple[str, ...]) -> None:
    assert run("translate", *MODEL, *words, stdin=TEXT) == (0, expected, "")
    assert list(Path().iterdir()) == []


def test_a_dash_among_other_words_is_text(run: Run) -> None:
    status, out, _ = run("translate", *MODEL, "-", "Yes.", stdin=TEXT)
    assert status == 0 and out.count("\n") == 2


def test_a_dash_is_standard_input_and_output_of_evaluate(run: Run, expected: str, tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("".join(line + "\n" for line in CHINESE[:3]))
    (tmp_path / "in").write_text(TEXT)
    status, scores, _ = run("evaluate", *MODEL, "--input", "in", "--reference", "ref")
    assert status == 0 and scores.startswith("BLEU ")
    reference = (tmp_path / "ref").read_text()
    assert run("evaluate", *MODEL, "--input", "-", "--reference", "ref", stdin=TEXT) == (0, scores, "")
    assert run("evaluate", *MODEL, "--input", "in", "--reference", "-", stdin=reference) == (0, scores, "")
    assert run("evaluate", *MODEL, "--input", "in", "--reference", "ref", "--output", "-") == (0, expected, scores)
    finished = ("--hypotheses", "-", "--reference", "ref", "--target-language", "zh")
    assert run("evaluate", *finished, stdin=expected) == (0, scores, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "ref"]


def test_a_dash_is_standard_input_and_output_of_score(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(TEXT)
    (tmp_path / "out").write_text("".join(line + "\n" for line in CHINESE[:3]))
    targets = (tmp_path / "out").read_text()
    status, scores, _ = run("score", *MODEL, "--input", "in", "--target", "out")
    assert status == 0 and scores.count("\n") == 3
    assert run("score", *MODEL, "--input", "-", "--target", "out", stdin=TEXT) == (0, scores, "")
    assert run("score", *MODEL, "--input", "in", "--target", "-", "--output", "-", stdin=targets) == (0, scores, "")
    _, found, _ = run("translate", *MODEL, "--format", "jsonl", "--input", "in")
    status, scores, _ = run("score", *MODEL, "--candidates", "-", stdin=found)
    assert status == 0 and scores.count("\n") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_dash_is_a_recipe_on_standard_input(run: Run, tmp_path: Path) -> None:
    is_one_line(run("train", "-", stdin="output = 3\nmax_stepz = 1\n"), "-: ", "max_stepz")
    is_one_line(run("train", "-", stdin="= ="), "-: not valid TOML")
    recipe = 'source_language = "en"\ntarget_language = "zh"\noutput = "out"\ncorpora = ["no-such.tsv"]\n'
    is_one_line(run("train", "-", stdin=recipe), str(tmp_path / "no-such.tsv"))


@pytest.mark.parametrize(
    "record",
    [
        '{"sentences": ["a"], "translations": [{"tokens": [["\\ud83d", "</s>"]]}]}',
        '{"sentences": ["\\ud83d"], "translations": [{"tokens": [["</s>"]]}]}',
        '{"sentences": ["a"], "translations": [{"tokens": [[1, null]]}]}',
        '{"sentences": "a", "translations": [{"tokens": [["</s>"]]}]}',
        '{"sentences": ["a"], "translations": [{"tokens": ["</s>"]}]}',
        '{"sentences": ["a", "b"], "translations": [{"tokens": [["</s>"]]}]}',
        "[" * 100_000,
        "null",
        "",
    ],
    ids=lambda record: record[:40],
)
def test_candidates_of_another_form_are_refused_by_line(run: Run, record: str) -> None:
    good = '{"sentences": ["a"], "translations": [{"tokens": [["</s>"]]}]}'
    is_one_line(run("score", *MODEL, "--candidates", "-", stdin=f"{good}\n{record}\n"), "stdin: line 2 is not what")


def test_what_cannot_be_scored_is_named_by_its_line(run: Run) -> None:
    good = '{"sentences": ["a", "b"], "translations": [{"tokens": [["</s>"], ["</s>"]]}]}'
    bad = '{"sentences": ["a"], "translations": [{"tokens": [[]]}]}'
    is_one_line(run("score", *MODEL, "--candidates", "-", stdin=f"{good}\n{bad}\n"), "line 2: there are no tokens")


PROFILE = ("profile", *MODEL, "--tokens", 3, "--source-length", 4, "--repeats", 1, "--arm", "none", "--arm", "dynamic")


def test_json_on_standard_output_is_alone_there(run: Run, tmp_path: Path) -> None:
    status, out, err = run(*PROFILE, "--json", "-")
    assert status == 0 and len(json.loads(out)["arms"]["dynamic"]["median_ms"]) == 3
    assert "first token ms" in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("evaluate", *MODEL, "--input", "-", "--reference", "-"), ("--input", "--reference", "standard input")),
        (("score", *MODEL, "--input", "-", "--target", "-"), ("--input", "--target", "standard input")),
        (("profile", *MODEL, "--plot", "-", "--json", "-"), ("--plot", "--json", "standard output")),
    ],
    ids=str,
)
def test_two_things_cannot_share_a_standard_stream(run: Run, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    is_one_line(run(*words), *parts)


def test_a_file_called_dash_has_another_name(run: Run, expected: str, tmp_path: Path) -> None:
    (tmp_path / "-").write_text(TEXT)
    assert run("translate", *MODEL, "--input", tmp_path / "-") == (0, expected, "")


# -- before the work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("translate", "--output", "no/folder/out", "x"), "no/folder/out"),
        (("translate", "--output", ".", "x"), "."),
        (("evaluate", "--input", "in", "--reference", "in", "--output", "no/out"), "no/out"),
        (("score", "--input", "in", "--target", "in", "--output", "no/out"), "no/out"),
        (("profile", "--plot", "no/cost.png"), "no/cost.png"),
        (("profile", "--json", "no/cost.json"), "no/cost.json"),
        (("profile", "--plot", "cost.bmp"), ".png, .pdf, .svg"),
        (("profile", "--plot", "cost"), ".png, .pdf, .svg"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_found_out_before_the_model_is_read(
    run: Run, tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    (tmp_path / "in").write_text("x\n")
    is_one_line(run(*words, "--checkpoint", "no-such-model"), name)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.b.svg", b"<?xml")], ids=str)
def test_a_picture_has_the_format_its_name_asks_for(run: Run, tmp_path: Path, name: str, start: bytes) -> None:
    status, _, _ = run(*PROFILE, "--plot", name)
    assert status == 0 and (tmp_path / name).read_bytes().startswith(start)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_kind_of_cache_and_size_of_batch_translates_the_same(run: Run, expected: str, kind: str) -> None:
    assert run("translate", *MODEL, "--cache", kind, "--batch-tokens", 40, stdin=TEXT) == (0, expected, "")


def test_any_number_of_workers_writes_the_same(run: Run, tmp_path: Path) -> None:
    """Lines that are blank, equal, longer than the model takes, of many sentences, without an end."""
    lines = ["", "Yes.", " ".join(ENGLISH), "word " * 900, *ENGLISH, "Yes.", "\u3000", *ENGLISH[:3], "1. Yes. 2. No."]
    (tmp_path / "in").write_text("\n".join(lines * 3))
    options = ("--input", "in", "--batch-tokens", 300, "--threads", 1)
    status, one, warned = run("translate", *MODEL, *options, "--workers", 1)
    assert status == 0 and one.count("\n") == 3 * len(lines) and warned.count("\n") == 3
    assert run("translate", *MODEL, *options, "--workers", 3, "--output", "out") == (0, "", warned)
    assert (tmp_path / "out").read_text() == one


def test_what_a_run_took_is_told_when_asked_for(run: Run) -> None:
    status, _, err = run("translate", *MODEL, "--stats", stdin="Yes.\nNo. Yes.\n\nYes.\n")
    assert status == 0 and err.count("\n") == 1
    assert err.startswith("translator: 4 lines, 4 sentences, 2 different, ")
    assert re.search(r" [\d,]+ lines and [\d,]+ target tokens a second; peak memory [\d,]+ MiB\n$", err)
    assert "nothing" in run("translate", *MODEL, "--stats", stdin="")[2]


def test_an_unknown_kind_of_cache_is_answered_with_those_known(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x\n")
    for words in (("translate", "x"), ("evaluate", "--input", "in", "--reference", "in")):
        is_one_line(run(*words, *MODEL, "--cache", "elastic"), "'elastic'", *CACHE_KINDS)
    is_one_line(run("profile", *MODEL, "--arm", "elastic"), "elastic", *CACHE_KINDS)
    is_one_line(run("translate", *MODEL, "--batch-tokens", 0, "x"), "--batch-tokens")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("parity", "--self-test", "--lines", "3"), "--lines"),
        (("parity", "--self-test", "--exact"), "--exact"),
        (("parity", "--self-test", "--beam-size", "3"), "--beam-size"),
        (("parity", "--lines", "3"), "--lines"),
        (("score", "--candidates", "in", "--input", "in"), "--candidates"),
        (("evaluate", "--hypotheses", "in", "--reference", "in", "--target-language", "zh", "--cache", "x"), "--cache"),
        (
            ("evaluate", "--hypotheses", "in", "--reference", "in", "--target-language", "zh", "--beam-size", "2"),
            "--beam-size",
        ),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_are_refused(
    run: Run, tmp_path: Path, words: tuple[str, ...], option: str
) -> None:
    (tmp_path / "in").write_text("x\n")
    is_one_line(run(*words), option)


def test_one_string_of_a_list_keeps_its_number(run: Run) -> None:
    status, out, _ = run("translate", *MODEL, "1. The cat sat. 2. The dog sat.")
    assert status == 0 and re.match(r"1\. .*2\. ", out)


def test_a_line_the_splitter_stumbled_over_stops_nothing(run: Run) -> None:
    status, out, err = run("translate", *MODEL, stdin="Yes.\nPlan B\u00a0. Go on.\nPlan B\u3000. Go on.\nYes.\n")
    assert (status, err) == (0, "")
    lines = out.split("\n")
    assert len(lines) == 5 and lines[0] == lines[3] and lines[1] == lines[2]


# -- samples and progress --------------------------------------------------------------------------------------------


def test_a_sample_is_spaced_evenly_from_the_first_line_to_the_last() -> None:
    assert spaced(5, 12) == [1, 2, 3, 4, 5] and spaced(0, 12) == []
    assert spaced(1000, 5) == [1, 250, 500, 750, 1000]
    assert spaced(1000, 1) == [1]
    for count in range(1, 60):
        for most in range(1, 20):
            numbers = spaced(count, most)
            assert len(set(numbers)) == len(numbers) == min(count, most) and 1 <= min(numbers) <= max(numbers) <= count


def test_differences_name_lines_of_the_file_and_not_of_the_sample() -> None:
    difference = TokenDifference("uncached", 2, 0, 1, 5, 6, 0.5, 1)
    built_in = replace(difference, line=4)
    tally = Tally(differences=[difference, built_in])
    report = ParityReport(4, [Check(torch.float64, "static", "greedy", tally)])
    _renumber(report, [1, 250, 500])
    assert [one.line for one in tally.differences] == [250, 4]
    assert any("line 250, " in note for note in report_notes(report))


@pytest.mark.slow
def test_parity_says_which_lines_it_took(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in ENGLISH * 10))
    status, out, _ = run("parity", *MODEL, "--input", "in", "--lines", 6)
    assert status == 0
    assert "in: 6 of 100 lines, evenly spaced (1, 20, 40, 60, …, 100); --lines 100 takes all\n" in out
    assert out.splitlines()[-1].startswith("parity: ")


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress_bar("comparing") as advance:
        for done in range(1, 251):
            now[0] += 0.125
            advance(done, 250 if done < 200 else None)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "translator: comparing: 80 of 250 after 10 s",
        "translator: comparing: 160 of 250 after 20 s",
        "translator: comparing: 240 after 30 s",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("translate", *MODEL, "--input", "in", "--output", "out"),
        ("evaluate", *MODEL, "--input", "in", "--reference", "in"),
        ("score", *MODEL, "--input", "in", "--target", "in"),
        PROFILE,
    ],
    ids=lambda words: words[0],
)
def test_long_commands_report_progress(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    monkeypatch.setattr(console, "PROGRESS_EVERY", 0.0)
    (tmp_path / "in").write_text(TEXT)
    status, _, err = run(*words, *(("--batch-tokens", 30) if words[0] != "profile" else ()))
    assert status == 0
    assert re.search(
        r"^translator: (translating, lines: 3(, .* a second)?|scoring: 3 of 3|timing, passes: 2 of 2)",
        err,
        flags=re.MULTILINE,
    )


def test_a_pipe_of_translations_is_not_mixed_with_progress(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PROGRESS_EVERY", 0.0)
    assert run("translate", *MODEL, stdin=TEXT)[2] == ""


# -- help ------------------------------------------------------------------------------------------------------------


def test_the_version(run: Run) -> None:
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"translator {__version__}, PyTorch ")
    assert re.search(r'dynamic = \["version"\]', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_help_has_a_short_form_and_examples_that_parse(run: Run, monkeypatch: pytest.MonkeyPatch, command) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    name = command.__name__.rpartition(".")[2]
    status, out, _ = run(name, "-h")
    assert status == 0 and out == run(name, "--help")[1]
    assert command.EXAMPLES
    for example in command.EXAMPLES:
        assert example in out
        parts = [part for part in example.split("|") if part.split()[0] == "translator"]
        for part in parts:
            _, subcommand, *arguments = shlex.split(part)
            typer.main.get_command(cli.app).commands[subcommand].make_context(subcommand, arguments)  # type: ignore[attr-defined]


def test_the_program_has_help_and_completion(run: Run) -> None:
    status, out, _ = run("-h")
    assert status == 0
    for word in ("--version", "--install-completion", *(command.__name__.rpartition(".")[2] for command in COMMANDS)):
        assert word in out


@pytest.mark.slow
def test_the_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(words: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", "from translator.cli import main; main()"],
            env={
                "PYTHONPATH": str(ROOT),
                "_TRANSLATOR_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split(" ")) - 1),
            },
            capture_output=True,
            text=True,
        ).stdout

    assert complete("translator tr").split() == ["translate", "train"]
    assert "--batch-tokens" in complete("translator translate --ba").split()


NOT_NEEDED = ("torch._dynamo", "torch._inductor", "sympy", "sacrebleu", "datasets", "matplotlib", "opencc",
              "language_data.name_data", "rich.console")  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_what_takes_long_to_import_is_not_imported_to_translate(packed: bool, tiny: Path, tmp_path: Path) -> None:
    if packed and not available():
        pytest.skip("the native kernels aren't built")
    folder = tmp_path / "packed" if packed else tiny
    if packed:
        export_checkpoint(tiny_checkpoint(), "packed", folder)
    code = f"""if True:
        import sys
        from translator.cli import main
        sys.argv = ["translator", "translate", "--checkpoint", {str(folder)!r}, "Thank you."]
        try:
            main()
        finally:
            print([name for name in {NOT_NEEDED!r} if name in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr
