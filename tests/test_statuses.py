"""When a stream fails or a signal ends it, the program says at most a line, has the README's status, leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from tests.helpers import tiny_checkpoint
from translator.checkpoint import write_checkpoint
from translator.stdio import stopped_by_signals

PROGRAM = [sys.executable, "-m", "translator"]
HELP = [*PROGRAM, "translate", "--help"]
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, tiny_checkpoint())
    return folder


def shell(command: str, *arguments: object) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a shell line in which `$@` is the program with these arguments."""
    words = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(["bash", "-c", command, "bash", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def is_one_line(stderr: str, *parts: str) -> bool:
    return (
        stderr.startswith("translator: error: ")
        and stderr.count("\n") == 1
        and all(part in stderr for part in parts)
        and len(stderr) < 1200
    )


# -- standard streams --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_standard_output_that_is_full_is_one_line_and_status_2(checkpoint: Path) -> None:
    for arguments in (["translate", "--help"], ["translate", "--checkpoint", checkpoint, "a"]):
        status, _, err = shell('"$@" > /dev/full', *arguments)
        assert status == 2
        assert is_one_line(err, "standard output: cannot be written: No space left on device")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_disk_that_fills_at_the_very_last_write_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What `score` prints is small enough to wait in a buffer until the end."""
    (tmp_path / "a").write_text("a\n")
    before = os.dup(1)
    with FULL.open("wb") as full:
        os.dup2(full.fileno(), 1)
    try:
        files = ("--input", tmp_path / "a", "--target", tmp_path / "a")
        assert refused(monkeypatch, capfd, "score", "--checkpoint", checkpoint, *files, "standard output: cannot be")
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_standard_output_that_is_closed_is_one_line_and_status_2() -> None:
    status, _, err = shell('"$@" >&-', "translate", "--help")
    assert status == 2
    assert is_one_line(err, "standard output is closed")


def test_a_closed_standard_output_that_is_not_needed_is_no_fault(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Descriptors that nobody holds go to the next file opened: it must not get what is meant for a stream.
    result = shell('"$@" <&- >&- 2>&-', "translate", "--checkpoint", checkpoint, "--output", out, "a", "", "a")
    assert result == (0, "", "")
    assert out.read_text().count("\n") == 3 and out.read_text().split("\n")[1] == ""


def test_standard_input_that_is_closed_is_one_line_and_status_2(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = shell('"$@" <&-', "translate", "--checkpoint", checkpoint)
    assert (status, out) == (2, "")
    assert is_one_line(err, "standard input is closed")
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of it
    assert refused(monkeypatch, capfd, "score", "--checkpoint", checkpoint, "--candidates", "-", "input is closed")


@pytest.mark.parametrize("where", ["&-", "/dev/full"])
def test_standard_error_that_cannot_be_written_changes_nothing_else(
    where: str, checkpoint: Path, tmp_path: Path
) -> None:
    assert shell(f'"$@" 2>{where}', "translate", "--wrong") == (2, "", "")
    text = "cat " * 400  # is cut with a warning
    status, out, err = shell(f'"$@" 2>{where}', "translate", "--checkpoint", checkpoint, "--beam-size=1", text, "")
    assert (status, out.count("\n"), err) == (0, 2, "")


@pytest.mark.parametrize("lines", [0, 3000])
def test_a_reader_that_has_gone_is_status_141_without_a_word(checkpoint: Path, lines: int) -> None:
    """Before the first line, in the middle of the output, or at its very end, where only the last flush notices."""
    arguments = ["translate", "--checkpoint", str(checkpoint)] if lines else ["translate", "--help"]
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        if lines:
            process.stdin.write(b"\n" * lines)
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"
            process.stdout.close()
            process.stdin.write(b"\n" * lines)
        else:
            process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


def test_an_endless_line_is_one_line_of_error_and_little_memory(checkpoint: Path) -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero")
    program = f"ulimit -v {6 << 20}; " + '"$@" < /dev/zero'
    status, out, err = shell(program, "translate", "--checkpoint", checkpoint)
    assert (status, out) == (2, "")
    assert is_one_line(err, "stdin: line 1 is longer than 16 MiB")


def test_a_value_of_ten_megabytes_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text('source_language = "' + "x" * 10_000_000 + '"\n')
    assert refused(monkeypatch, capfd, "train", tmp_path / "recipe.toml", "recipe.toml: ")
    assert refused(monkeypatch, capfd, "translate", "--device", "x" * 100_000, "x … x")


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("translate", "--threads", 1_000_000),
        ("translate", "--workers", 1_000_000),
        ("translate", "--beam-size", 100_000_000),
        ("translate", "--n-best", 100_000_000),
        ("translate", "--n-best", "9" * 5000),
        ("parity", "--threads", 10**30),
        ("parity", "--beam-size", 100_000_000),
        ("parity", "--lines", 10**9),
        ("evaluate", "--batch-tokens", 10**9),
        ("profile", "--batch", 10**9),
        ("profile", "--beams", 10**9),
        ("profile", "--tokens", 10**9),
        ("profile", "--source-length", 10**9),
        ("profile", "--repeats", 10**9),
    ],
)
def test_a_number_that_no_machine_can_meet_is_one_line(
    command: str, option: str, value: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capfd, command, option, value, option)


def test_a_timing_of_too_many_rows_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capfd, "profile", "--batch=1000", "--beams=1000", "1,000,000 rows")


def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: object) -> bool:
    """Whether all words but the last, as a command line, are refused in a line that holds the last."""
    from translator.cli import main

    *arguments, part = map(str, words)
    monkeypatch.setattr(sys, "argv", ["translator", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code == 2 and is_one_line(capfd.readouterr().err, part)


# -- signals -----------------------------------------------------------------------------------------------------------


def waiting_for_a_second_line(checkpoint: Path, out: Path) -> "subprocess.Popen[bytes]":
    """The program in the middle of `translate --output`."""
    process = subprocess.Popen(
        [*PROGRAM, "translate", "--checkpoint", str(checkpoint), "--output", str(out)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pipe: IO[bytes] | None = process.stdin
    assert pipe
    pipe.write(b"a\n")
    pipe.flush()
    ends = time.monotonic() + 60
    while not (found := [path for path in out.parent.glob(".*.tmp") if path.stat().st_size]):
        assert time.monotonic() < ends and process.poll() is None, found
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_old_file_and_nothing_else(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "out").write_text("old\n")
    process = waiting_for_a_second_line(checkpoint, tmp_path / "out")
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert process.stderr and process.stderr.read() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old\n"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, "reader"])
def test_workers_in_the_middle_of_many_batches_stop_at_once(checkpoint: Path, end: "signal.Signals | str") -> None:
    options = ["--workers=3", "--batch-tokens=200", "--beam-size=1", "--set=max_length_factor=4"]
    with subprocess.Popen(
        [*PROGRAM, "translate", "--checkpoint", str(checkpoint), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"a\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\n")
        process.stdin.write(b"".join(b"%d so many words to be decoded " % number * 3 + b"\n" for number in range(400)))
        process.stdin.flush()
        if end == "reader":  # at once: on a quick machine all would be said before long
            process.stdout.close()
            process.stdin.close()
        else:
            time.sleep(1)
            process.send_signal(end)
        start = time.monotonic()
        assert process.wait(60) == (141 if end == "reader" else 128 + end)
        assert end == "reader" or time.monotonic() - start < 5
        assert process.stderr.read() == b""


def test_a_signal_that_was_ignored_still_is() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_stays_flat_over_20000_piped_lines(checkpoint: Path) -> None:
    settings = ["--set=max_length_factor=0", "--set=max_length_extra=2"]
    with subprocess.Popen(
        [*PROGRAM, "translate", "--checkpoint", str(checkpoint), "--beam-size=1", *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        megabytes = []
        for part in range(20):
            for _ in range(10):
                process.stdin.write(b"a cat\n\n" * 50)
                process.stdin.flush()
                for _ in range(100):
                    assert process.stdout.readline().endswith(b"\n")
            if part % 5 == 4:
                status = Path(f"/proc/{process.pid}/status").read_text()
                megabytes.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
        process.stdin.close()
        assert process.wait(20) == 0
    assert megabytes[-1] - megabytes[0] < 20, megabytes
