#!/usr/bin/env python3
"""Writes the test part of a shipped recipe's corpora as aligned files: sentences no shipped model was trained on.

Usage: scripts/held_out.py [--recipe small] [--sentences N] SOURCE_FILE TARGET_FILE     (the first reference of each)
"""

import argparse
from pathlib import Path

from train.data import load_data
from train.recipe import read_recipe
from translator.textio import atomic_writer


def main() -> None:
    """Parses, loads, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--sentences", type=int)
    parser.add_argument("files", nargs=2, type=Path, metavar="FILE")
    given = parser.parse_args()
    test = load_data(*read_recipe(given.recipe), say=lambda line: None).test
    for path, lines in zip(given.files, (test.sources, [versions[0] for versions in test.references]), strict=True):
        with atomic_writer(path) as out:
            out.writelines(line.replace("\n", " ") + "\n" for line in lines[: given.sentences])


if __name__ == "__main__":
    main()
