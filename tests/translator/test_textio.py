"""Lines end at newlines and nowhere else; files are replaced whole or not at all."""

import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from translator.errors import UserError
from translator.textio import (
    LONGEST_LINE,
    atomic_write_bytes,
    atomic_writer,
    check_writable,
    iter_lines,
    json_text,
    read_limited,
    read_lines,
)


def lines_of(data: bytes) -> list[str]:
    return list(iter_lines(io.BytesIO(data), "input"))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\r", "\x1c"])
def test_only_a_newline_ends_a_line(mark: str) -> None:
    assert lines_of(f"one\ntw{mark}o\nthree\n".encode()) == ["one", f"tw{mark}o", "three"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb", ["a", "b"]),
        (b"a\nb\n", ["a", "b"]),
        (b"\n\na\n\n", ["", "", "a", ""]),
        (b"a\r\n\r\nb\r\r\n", ["a", "", "b\r"]),
        (b"a\r", ["a\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
    ],
)
def test_line_ends_and_byte_order_mark(data: bytes, expected: list[str]) -> None:
    assert lines_of(data) == expected


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"latin1\.txt: line 2 is not valid UTF-8; convert it, .*iconv"):
        read_lines(path)


def test_unreadable_paths_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.txt: cannot be read: No such file"):
        read_lines(tmp_path / "absent.txt")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_lines(tmp_path)


def test_a_line_from_a_pipe_is_given_before_the_next_one_is_sent() -> None:
    # The sender waits for each line's answer: a reader that wants more before it answers would wait for ever.
    code = """
import sys
from translator.textio import iter_lines
for line in iter_lines(sys.stdin.buffer, "pipe"):
    print(line.upper(), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        rescue = threading.Timer(20, child.kill)
        rescue.start()
        for word in (b"one", b"two"):
            child.stdin.write(word + b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == word.upper() + b"\n"
        rescue.cancel()


def test_written_text_is_utf8_with_plain_newlines(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with atomic_writer(path) as out:
        out.write("价格：１２３\n")
        out.write("a\u2028b\n")
    assert path.read_bytes() == "价格：１２３\na\u2028b\n".encode()
    atomic_write_bytes(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_writer(path) as out:
        out.write("half of the new " * 10_000)
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_an_error_about_another_file_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_writer(tmp_path / "out.txt"):
        (tmp_path / "absent").read_text()
    assert list(tmp_path.iterdir()) == []


FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from translator.errors import UserError
from translator.textio import atomic_write_bytes, atomic_writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path = Path(sys.argv[1])
for attempt in (lambda: atomic_write_bytes(path, b"x" * 9999), lambda: write()):
    def write():
        with atomic_writer(path) as out:
            out.write("x" * 9999)
    try:
        attempt()
    except UserError as error:
        print(error)
"""


def test_no_room_for_the_new_file_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", FILL_THE_DISK, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{path}: cannot be written: File too large"] * 2
    assert done.stderr == ""
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_missing_folder_folder_and_full_device_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent/out\.txt: cannot be written: No such file"):
        atomic_write_bytes(tmp_path / "absent" / "out.txt", b"")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out\.txt: cannot be written: Not a directory"):
        atomic_write_bytes(tmp_path / "file" / "out.txt", b"")
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        atomic_write_bytes(tmp_path, b"")
    with (
        pytest.raises(UserError, match="/dev/full: cannot be written: No space left"),
        atomic_writer(Path("/dev/full")) as out,
    ):
        out.write("text")


def test_permissions_and_links_survive_replacement(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    atomic_write_bytes(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_new_file_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    atomic_write_bytes(tmp_path / "new", b"")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_fifo_is_written_to_and_stays_a_fifo(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()
    atomic_write_bytes(fifo, b"through")
    reader.join(5)
    assert received == [b"through"]
    assert fifo.is_fifo()


def test_standard_output_appended_to_a_file_keeps_what_the_file_holds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    code = """
from pathlib import Path
from translator.textio import atomic_write_bytes
atomic_write_bytes(Path("/dev/stdout"), b"new")
"""
    with log.open("ab") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
    assert log.read_text() == "earlier\nnew"


WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
from translator.textio import atomic_writer
with atomic_writer(Path(sys.argv[1])) as out:
    print(flush=True)
    time.sleep(60)
"""


def test_what_a_kill_leaves_is_swept_by_the_next_writer_unless_its_own_lives(tmp_path: Path) -> None:
    writers = []
    for name in ("killed", "living"):
        writers.append(
            subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, tmp_path / name], stdout=subprocess.PIPE)
        )
        assert writers[-1].stdout and writers[-1].stdout.readline() == b"\n"
        if name == "killed":
            [left] = tmp_path.iterdir()
    killed, living = writers
    killed.kill()
    killed.wait(10)
    atomic_write_bytes(tmp_path / "new", b"")
    assert left.exists(), "it may be so new that its writer hasn't locked it yet"
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    (tmp_path / ".translator-of-mine").touch()
    atomic_write_bytes(tmp_path / "new", b"")
    assert not left.exists()
    assert len(list(tmp_path.glob(".translator-*.tmp"))) == 1  # the living writer's
    assert {path.name for path in tmp_path.iterdir()} > {"new", ".translator-of-mine"}
    living.kill()
    living.wait(10)
    for writer in writers:
        assert writer.stdout
        writer.stdout.close()


def test_a_read_only_file_is_refused_and_kept_whoever_asks(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o444)
    for attempt in (
        lambda: atomic_write_bytes(path, b"new"),
        lambda: check_writable(path),
        lambda: atomic_writer(path).__enter__(),
    ):
        with pytest.raises(UserError, match=r"out\.txt: is read-only; make it writable or name another file"):
            attempt()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent/out.txt", "No such file"),
        ("file/out.txt", "Not a directory"),
        ("folder", "Is a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_where_nothing_can_be_written_is_known_before_the_work(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=rf"cannot be written: .*{expected}"):
        check_writable(tmp_path / name)
    with pytest.raises(UserError, match=rf"cannot be written: .*{expected}"), atomic_writer(tmp_path / name):
        pytest.fail("the work has begun")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_where_something_can_be_written_nothing_is_changed_by_asking(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "dangling").symlink_to("new")
    for name in ("old", "link", "dangling", "new"):
        check_writable(tmp_path / name)
    check_writable(Path("/dev/stdout"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "old"]
    assert (tmp_path / "old").read_text() == "old"


def test_a_line_may_be_as_long_as_stated_and_not_longer() -> None:
    longest = b"x" * LONGEST_LINE
    for end in (b"", b"\n", b"\r\n"):
        text = longest[: LONGEST_LINE - (end == b"\r\n")] + end
        assert [len(line) for line in lines_of(b"a\n" + text + b"\n" * (end != b"") + b"")][:2] == [
            1,
            len(text) - len(end),
        ]
    with pytest.raises(UserError, match="input: line 2 is longer than 16 MiB"):
        lines_of(b"a\n" + longest + b"x\n")


def test_a_file_is_read_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_limited(tmp_path / "file", 5) == b"12345"
    with pytest.raises(UserError, match="file: 5 bytes are too many; at most 4 are read"):
        read_limited(tmp_path / "file", 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1, float("-inf")]}])
def test_json_never_holds_what_is_no_number(value: object) -> None:
    assert json_text({"价格": 0.5}) == '{"价格": 0.5}'
    with pytest.raises(UserError, match="NaN or infinite"):
        json_text(value)
