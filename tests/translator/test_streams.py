"""Windows of lines: full ones from a file, what has arrived from a pipe."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from translator.errors import UserError
from translator.streams import windows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pipe() -> Iterator[tuple]:
    read, write = os.pipe()
    reader, writer = os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)
    yield reader, writer
    writer.close()
    reader.close()


def within(seconds: float, call):
    """The result of `call`, which may not take longer."""
    result: list = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, "waited for what had not been sent"
    return result[0]


def test_from_a_pipe_the_first_line_comes_before_the_second_is_sent(pipe):
    reader, writer = pipe
    got = windows(reader, "stdin", 100)
    for number in range(3):
        writer.write(f"line {number}\n".encode())
        assert within(5, lambda: next(got)) == [f"line {number}"]
    writer.write(b"no end")
    writer.close()
    assert within(5, lambda: list(got)) == [["no end"]]


def test_from_a_pipe_what_has_arrived_comes_in_order_and_bounded(pipe):
    reader, writer = pipe
    lines = [str(number) for number in range(500)]
    writer.write(("\n".join(lines) + "\n").encode())
    writer.close()
    got = within(5, lambda: list(windows(reader, "stdin", 64)))
    assert [line for window in got for line in window] == lines
    assert all(0 < len(window) <= 64 for window in got)


def test_lines_that_arrive_during_work_wait_together(pipe):
    reader, writer = pipe
    got = windows(reader, "stdin", 10)
    writer.write(b"a\n")
    assert within(5, lambda: next(got)) == ["a"]
    writer.write(b"b\n\nc\n")
    time.sleep(0.3)
    assert within(5, lambda: next(got)) == ["b", "", "c"]
    writer.close()
    assert within(5, lambda: list(got)) == []


def test_long_lines_make_short_windows(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr("translator.streams.MOST_CHARACTERS", 10)
    lines = ["x" * 12, "aaaa", "bbbb", "cccc", "dddd", "", "e"]
    data = "\n".join(lines).encode()
    (tmp_path / "lines").write_bytes(data)
    with (tmp_path / "lines").open("rb") as stream:
        assert list(windows(stream, "lines", 100)) == [lines[:1], lines[1:4], lines[4:]]
    reader, writer = pipe
    writer.write(data)
    writer.close()
    got = windows(reader, "stdin", 100)
    first = within(5, lambda: next(got))
    time.sleep(0.2)  # the reading thread stops where the window is full
    # What has arrived by then is a matter of luck, and so is where the windows end; none goes on once it is full.
    rest = within(5, lambda: list(got))
    assert [line for window in (first, *rest) for line in window] == lines
    assert first == lines[:1] and all(sum(map(len, window[:-1])) < 10 for window in rest)


def test_from_a_file_windows_are_full(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(10)))
    with path.open("rb") as stream:
        assert [len(window) for window in windows(stream, "lines", 4)] == [4, 4, 2]
    assert list(windows(io.BytesIO(b"a\nb\n\xe2\x80\xa8c\n"), "memory", 2)) == [["a", "b"], ["\u2028c"]]
    assert list(windows(io.BytesIO(b""), "memory", 2)) == []


def test_the_lines_before_a_bad_one_are_given_first(pipe, tmp_path):
    reader, writer = pipe
    writer.write(b"one\ntwo\n\xff\nfour\n")
    writer.close()
    (tmp_path / "lines").write_bytes(b"one\ntwo\n\xff\nfour\n")
    with (tmp_path / "lines").open("rb") as stream:
        for source, most in ((reader, 100), (stream, 100)):
            got: list[str] = []
            with pytest.raises(UserError, match="name: line 3 is not valid UTF-8"):
                for window in windows(source, "name", most):
                    got += window
            assert got == ["one", "two"]


@pytest.mark.parametrize("end", ["exit", "interrupt"])
def test_a_program_can_end_while_it_waits_for_a_line(end):
    """Its own status, no abort: Python can't shut down over a thread that holds `sys.stdin`."""
    program = (
        "import sys, types\n"
        "package = types.ModuleType('translator'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['translator'] = package\n"  # streams alone, without torch
        "from translator.streams import windows\n"
        "for window in windows(sys.stdin.buffer, 'stdin', 10):\n"
        "    print(window, flush=True)\n"
        "    if sys.argv[2] == 'exit': sys.exit(2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT / "translator"), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"['one']\n"
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == (2 if end == "exit" else -signal.SIGINT)
        assert b"Fatal" not in process.stderr.read()
        process.stdin.close()
