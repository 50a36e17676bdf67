"""The proof that no test sentence is trained on: it holds, and it fails where one is."""

import subprocess
import sys
from pathlib import Path

RECIPE = """
source_language = "en"
target_language = "de"
output = "run"
corpora = ["pairs.tsv"]
[split]
dev = ["dev.tsv"]
test = ["test.tsv"]
[filters]
target_script = "any"
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "pairs.tsv").write_text("".join(f"one {n}\teins {n}\n" for n in range(40)))
    (folder / "dev.tsv").write_text("two\tzwei\n")
    command = [sys.executable, "-m", "translator", "evaluate", "--check-leakage", "recipe.toml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_what_the_filters_took_out_is_not_in_training(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("ONE 3 \tdrei\nother\teins 5\n")
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "leakage: 0 of 38 training pairs hold one of 4 test sentences\n"


def test_a_sentence_on_either_side_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("other\tandere\n")
    (tmp_path / "given.en").write_text("something else\nOne\u200b 7\n")
    (tmp_path / "given.de").write_text("eins 9\n\n")
    done = check(tmp_path, "--input", "given.en", "--reference", "given.de")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "leakage: 2 of 40 training pairs hold one of 3 test sentences",
        "  pairs.tsv:8: one 7 | eins 7",
        "  pairs.tsv:10: one 9 | eins 9",
    ]


def test_a_folder_without_a_check_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "translator", "evaluate", "--data", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "--data: goes with --check-leakage" in done.stderr
