"""The program as its users meet it: what goes in, what comes out, what a mistake looks like."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.copy_task import sentences, write_copy_task
from train.run import run_recipe
from translator import cli
from translator.cache import DecoderCache

ODD_LINES = [
    "",
    "   ",
    "\u3000",
    "red\tcat",
    "red\rcat",
    "red\u2028cat",
    "red\u0085cat\x0b\x0c",
    "</s> <pad> red",
    "ok 😀 👨‍👩‍👧 é 你",
    "\u200b",
    "red",
]


@pytest.fixture(scope="session")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has learned to copy its source."""
    folder = tmp_path_factory.mktemp("copier")
    recipe = write_copy_task(folder)
    for side in ("src", "tgt"):
        (folder / f"pairs.{side}").write_text("\n".join(sentences(3000, 1)) + "\n")
    settings = ["model.d_model=64", "training.batch_tokens=512", "training.max_steps=500", "evaluation.every=500"]
    run_recipe(str(recipe), settings)
    return folder / "run" / "best"


Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(copier: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process: (status, stdout, stderr). `{copier}` in an argument is the checkpoint."""

    def call(*arguments: object) -> tuple[int, str, str]:
        words = [str(argument).replace("{copier}", str(copier)) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["translator", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def is_one_line_of_help(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("translator: error: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in parts:
        assert part in err


# -- translate -------------------------------------------------------------------------------------------------------


def test_a_file_gives_as_many_lines_in_the_same_order(run: Run, tmp_path: Path) -> None:
    lines = ["" if number % 4 == 0 else text for number, text in enumerate(sentences(1300, 5))]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    status, out, err = run(
        "translate", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--output", tmp_path / "out"
    )
    assert (status, out, err) == (0, "", "")
    translated = (tmp_path / "out").read_text().split("\n")
    assert translated.pop() == ""
    assert len(translated) == 1300
    assert [index for index, line in enumerate(translated) if (line == "") != (lines[index] == "")] == []
    right = sum(one == two for one, two in zip(lines, translated, strict=True))
    assert right > 1200  # a shift by one line would leave a handful


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("beams", [1, 3])
def test_odd_lines_lose_and_add_nothing(run: Run, tmp_path: Path, end: str, beams: int) -> None:
    (tmp_path / "in").write_bytes(("\ufeff" + "\n".join(ODD_LINES) + end).encode())
    status, out, _ = run("translate", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--beam-size", beams)
    assert status == 0
    assert out.count("\n") == len(ODD_LINES)
    translated = out.split("\n")
    assert translated[:3] == ["", "", ""]
    assert translated[3] == translated[4] == translated[5] == "red cat"
    assert translated[len(ODD_LINES) - 1] == "red"
    assert "\r" not in out


def test_crlf_lines_are_the_same_lines(run: Run, tmp_path: Path) -> None:
    results = []
    for name, end in (("lf", "\n"), ("crlf", "\r\n")):
        (tmp_path / name).write_bytes(end.join(["red cat", "", "blue dog"]).encode())
        results.append(run("translate", "--checkpoint", "{copier}", "--input", tmp_path / name))
    assert results[0] == results[1] == (0, "red cat\n\nblue dog\n", "")


@pytest.mark.parametrize("lines", [[], [""], ["", "", ""], ["", "red"], ["red", ""]])
def test_files_of_nothing_and_next_to_nothing(run: Run, tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "in").write_text("".join(line + "\n" for line in lines))
    assert run("translate", "--checkpoint", "{copier}", "--input", tmp_path / "in") == (
        0,
        "".join(line + "\n" for line in lines),
        "",
    )


def test_a_line_of_5000_words_is_cut_with_a_warning_and_stops_nothing(run: Run, tmp_path: Path) -> None:
    lines = ["red cat"] * 10
    lines[4] = "red " * 5000
    (tmp_path / "in").write_text("\n".join(lines))
    status, out, err = run("translate", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--beam-size", 1)
    assert status == 0
    assert out.count("\n") == 10
    assert out.split("\n")[5:9] == ["red cat"] * 4
    assert err.startswith("translator: warning: line 5: ") and err.count("\n") == 1


def test_json_lines_carry_scores_tokens_and_alternatives(run: Run, tmp_path: Path) -> None:
    status, out, _ = run(
        "translate", "--checkpoint", "{copier}", "--format", "jsonl", "--beam-size", 3, "--n-best", 2, "red cat", ""
    )
    first, second = (json.loads(line) for line in out.splitlines())
    assert status == 0
    assert first["translations"][0]["text"] == "red cat"
    assert len(first["translations"]) == 2
    assert first["translations"][0]["score"] >= first["translations"][1]["score"]
    assert first["translations"][0]["tokens"][0][-1] == "</s>"
    assert (second["line"], second["source"], second["translations"][0]["text"]) == (2, "", "")


@pytest.mark.parametrize("search", [("--beam-size", 1), ("--beam-size", 4, "--n-best", 4), ("--sample", "--n-best", 3)])
def test_score_gives_what_the_search_reported(run: Run, tmp_path: Path, search: tuple[object, ...]) -> None:
    lines = ["red cat", "blue dog. red sun.", "", *sentences(20, 7)]
    (tmp_path / "in").write_text("\n".join(lines))
    common = ("--checkpoint", "{copier}")
    _, out, _ = run("translate", *common, "--format", "jsonl", "--input", tmp_path / "in", *search)
    (tmp_path / "found").write_text(out)
    status, scored, _ = run("score", *common, "--candidates", tmp_path / "found")
    assert status == 0
    reported = [found for line in out.splitlines() for found in json.loads(line)["translations"]]
    assert len(scored.splitlines()) == len(reported)
    for line, found in zip(scored.splitlines(), reported, strict=True):
        log_prob, tokens = line.split("\t")
        assert float(log_prob) == pytest.approx(found["log_prob"], abs=1e-4)
        assert int(tokens) == sum(map(len, found["tokens"]))


def test_score_of_two_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("red cat\nred cat\n")
    (tmp_path / "b").write_text("red cat\nblue dog sea\n")
    status, out, _ = run("score", "--checkpoint", "{copier}", "--input", tmp_path / "a", "--target", tmp_path / "b")
    good, bad = (float(line.split("\t")[0]) for line in out.splitlines())
    assert status == 0
    assert good > bad + 3


def test_a_prefix_starts_every_translation(run: Run) -> None:
    _, out, _ = run("translate", "--checkpoint", "{copier}", "--prefix", "moon", "red cat", "blue dog")
    assert all(line.startswith("moon") for line in out.splitlines())


@pytest.mark.slow
def test_a_pipe_is_translated_as_its_lines_arrive(copier: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "translator", "translate", "--checkpoint", copier],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    for text in (b"red cat\n", b"\n", b"blue dog\n"):
        process.stdin.write(text)
        process.stdin.flush()
        assert process.stdout.readline() == text  # would wait for ever if output waited for the end of input
    process.stdin.close()
    assert process.stdout.read() == b""
    assert process.wait() == 0


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(copier: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("red cat\n" * 3000)
    process = subprocess.Popen(
        [sys.executable, "-m", "translator", "translate", "--checkpoint", copier, "--input", tmp_path / "in"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()


@pytest.mark.slow
def test_from_any_folder_and_as_a_module(copier: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "translator", "translate", "--checkpoint", copier, "--threads", "1", "red cat"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "red cat\n", "")


# -- evaluate --------------------------------------------------------------------------------------------------------


def test_evaluate_prints_scores_and_signatures(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(sentences(20, 9)))
    status, out, _ = run(
        "evaluate", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--reference", tmp_path / "in"
    )
    assert status == 0
    bleu, chrf = out.splitlines()
    assert float(bleu.split()[1]) > 80 and "tok:13a" in bleu
    assert float(chrf.split()[1]) > 80 and chrf.split()[0] == "chrF"


@pytest.mark.parametrize("code", ["zh", "zho_Hans", "ZH-cn", "cmn"])
def test_evaluate_takes_finished_translations_and_chinese(run: Run, tmp_path: Path, code: str) -> None:
    (tmp_path / "zh").write_text("我们试试看！\n价格：１２３％，好！\n")
    status, out, _ = run(
        "evaluate", "--hypotheses", tmp_path / "zh", "--reference", tmp_path / "zh", "--target-language", code
    )
    assert status == 0
    assert out.startswith("BLEU 100.00") and "tok:zh" in out


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("translate", "--beam-size", "0", "x"), ("--beam-size", "1")),
        (("translate", "--beam-size", "9999", "x"), ("--beam-size", "1024")),
        (("translate", "--beam-size", "299", "x"), ("beam_size 299", "vocabulary of 290")),
        (("translate", "--n-best", "3", "x"), ("--n-best", "jsonl")),
        (("translate", "--n-best", "9", "--beam-size", "2", "--format", "jsonl", "x"), ("n_best 9", "beam_size 2")),
        (("translate", "--device", "cuda:99", "x"), ("cuda:99", "cpu")),
        (("translate", "--device", "toaster", "x"), ("toaster",)),
        (("translate", "--set", "lenght_penalty=1", "x"), ("lenght_penalty", "length_penalty")),
        (("translate", "--set", "length_penalty=-1", "x"), ("length_penalty", "0")),
        (("translate", "--set", "nothing", "x"), ("--set", "key=value")),
        (("translate", "--input", "/no/such/file"), ("/no/such/file",)),
        (("translate", "--output", "/no/such/folder/out", "x"), ("/no/such/folder/out",)),
        (("translate", "--threads", "0", "x"), ("--threads",)),
        (("translate", "--wrong", "x"), ("--wrong",)),
        (("score",), ("--input", "--target")),
        (("evaluate", "--reference", "x"), ("--input",)),
    ],
)
def test_a_mistake_is_one_line(run: Run, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    command, *rest = arguments
    is_one_line_of_help(run(command, "--checkpoint", "{copier}", *rest), *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(run: Run) -> None:
    is_one_line_of_help(run("translate", "--checkpoint", "{copier}", "--device", "cuda", "x"), "cuda", "cpu")


def test_unknown_commands_and_recipes(run: Run) -> None:
    is_one_line_of_help(run("transalte"), "transalte")
    is_one_line_of_help(run("train", "no-such-recipe"), "no-such-recipe", "small")
    is_one_line_of_help(run("train", "small", "--set", "training.max_step=1"), "training.max_step", "max_steps")
    is_one_line_of_help(run("train", "small", "--set", "training.max_steps=-1"), "max_steps", "1")


def test_unequal_files_name_both_counts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_text("x\n")
    common = ("--checkpoint", "{copier}", "--input", tmp_path / "a")
    is_one_line_of_help(run("evaluate", *common, "--reference", tmp_path / "b"), "2 lines", "1 lines", "/b")
    is_one_line_of_help(run("score", *common, "--target", tmp_path / "b"), "2 lines", "1 lines", "/b")


def test_invalid_utf8_names_the_line_and_leaves_no_output(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"red\ncaf\xe9\nred\n")
    (tmp_path / "out").write_text("old\n")
    result = run("translate", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--output", tmp_path / "out")
    is_one_line_of_help(result, "line 2", "UTF-8")
    assert (tmp_path / "out").read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_json_lines_of_another_program_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"text": 1}\n')
    is_one_line_of_help(run("score", "--checkpoint", "{copier}", "--candidates", tmp_path / "in"), "line 1")


def test_broken_checkpoints(run: Run, copier: Path, tmp_path: Path) -> None:
    is_one_line_of_help(run("translate", "--checkpoint", tmp_path / "none", "x"), "none", "model.safetensors")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        (broken / name).write_bytes((copier / name).read_bytes())
    for name, cut in (("model.safetensors", 1000), ("tokenizer.model", 50), ("config.json", 20)):
        whole = (broken / name).read_bytes()
        (broken / name).write_bytes(whole[:cut])
        is_one_line_of_help(run("translate", "--checkpoint", broken, "x"), name)
        (broken / name).unlink()
        is_one_line_of_help(run("translate", "--checkpoint", broken, "x"), name)
        (broken / name).write_bytes(whole)


@pytest.mark.slow
def test_help_and_mistakes_need_no_torch() -> None:
    code = "import sys, translator.cli; assert 'torch' not in sys.modules, 'the command line imports torch'"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- parity and profile ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_passes_and_ends_with_a_count(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(sentences(3, 4)))
    status, out, err = run("parity", "--checkpoint", "{copier}", "--input", tmp_path / "in", "--threads", 1)
    assert status == 0 and all(line.startswith("translator: comparing: ") for line in err.splitlines())
    positions, searches, passed, checks = re.fullmatch(
        r"parity: ([\d,]+) positions and (\d+) searches, (\d+) of (\d+) checks passed", out.splitlines()[-1]
    ).groups()  # type: ignore[union-attr]
    assert int(positions.replace(",", "")) > 1000 and int(searches) > 50
    assert passed == checks


@pytest.mark.slow
def test_parity_notices_a_fault_with_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DecoderCache.positions

    def from_zero(self: DecoderCache, T: int) -> torch.Tensor:
        return original(self, T) * 0

    monkeypatch.setattr(DecoderCache, "positions", from_zero)
    status, out, _ = run("parity", "--checkpoint", "{copier}", "--threads", 1)
    assert status == 1
    assert "FAIL" in out


def test_options_that_would_be_ignored_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("red\n")
    is_one_line_of_help(run("parity", "--self-test", "--input", tmp_path / "in"), "--input")
    same = ("--input", tmp_path / "in", "--reference", tmp_path / "in")
    is_one_line_of_help(run("evaluate", *same, "--target-language", "zh"), "--target-language")


def test_parity_needs_a_beam_of_three(run: Run) -> None:
    is_one_line_of_help(run("parity", "--checkpoint", "{copier}", "--beam-size", 2), "3")


def test_profile_prints_a_table_and_writes_both_files(run: Run, tmp_path: Path) -> None:
    status, out, _ = run(
        *("profile", "--checkpoint", "{copier}", "--tokens", 6, "--repeats", 2, "--threads", 1),
        *("--plot", tmp_path / "cost.png", "--json", tmp_path / "cost.json"),
    )
    assert status == 0
    assert all(arm in out for arm in ("none", "dynamic", "static"))
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "cost.json").read_text())
    assert len(figures["arms"]["dynamic"]["median_ms"]) == 6


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--tokens", "0"), "--tokens"),
        (("--tokens", "999"), "999"),
        (("--arm", "elastic"), "elastic"),
        (("--dtype", "float8"), "float8"),
        (("--device", "cuda:77"), "cuda:77"),
        (("--preset", "small"), "--preset"),
    ],
)
def test_profile_refuses_what_it_cannot_do(run: Run, arguments: tuple[str, str], part: str) -> None:
    is_one_line_of_help(run("profile", "--checkpoint", "{copier}", *arguments), part)
