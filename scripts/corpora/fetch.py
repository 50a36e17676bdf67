"""Gets Debian's packages, takes the parallel text out of them and writes a table of pairs for each source.

Nothing is installed and no rights are needed: packages are downloaded by apt, unpacked into a temporary folder and
thrown away. A table that is there already is left as it is.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from corpora.clean import cleaned
from corpora.packages import SOURCES, Source
from translator.errors import UserError
from translator.textio import atomic_write_bytes

HEADER = "en\tzh\n"


def fetch(folder: Path, sources: Sequence[Source] = SOURCES) -> None:
    """Writes `folder`/NAME.tsv for each source that has none yet; raises `UserError` naming what can't be had."""
    wanted = [source for source in sources if not (folder / f"{source.name}.tsv").exists()]
    for source in sources:
        if source not in wanted:
            typer.echo(f"{source.name}: there already")
    if not wanted:
        return
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UserError(
                f"{tool} is not there: this text is taken from Debian's packages. On another system, run this on a "
                f"Debian or Ubuntu machine and copy {folder}/*.tsv; the recipes en-zh and zh-en need them"
            )
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="corpora-") as place, ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda source: _unpacked(source, Path(place) / source.name), wanted)
        for source, problem in zip(wanted, results, strict=True):
            if problem:
                failed.append(f"{source.name}: {problem}")
                continue
            pairs = list(cleaned(source.read(Path(place) / source.name)))
            text = HEADER + "".join(f"{english}\t{chinese}\n" for english, chinese in pairs)
            atomic_write_bytes(folder / f"{source.name}.tsv", text.encode())
            typer.echo(f"{source.name}: {len(pairs):,} pairs; {source.licence}")
    if failed:
        raise UserError("; ".join(failed))


def _unpacked(source: Source, folder: Path) -> str:
    """Downloads and unpacks the packages of `source` into `folder`; says what went wrong, nothing where all is well."""
    folder.mkdir()
    for package in source.packages:
        got = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, text=True)
        files = list(folder.glob(f"{package}_*.deb"))
        if got.returncode or not files:
            said = [line for line in got.stderr.splitlines() if line.startswith("E:")]
            return f"apt-get download {package}: {said[-1] if said else 'no such package'} (is `apt-get update` due?)"
        unpacked = subprocess.run(["dpkg-deb", "-x", files[0], folder], capture_output=True, text=True)
        files[0].unlink()
        if unpacked.returncode:
            return f"dpkg-deb -x {package}: {unpacked.stderr.strip()}"
    return ""


def main(folder: Annotated[Path, typer.Argument(help="Where the tables go.")] = Path("corpora")) -> None:
    """Fetch the English-Chinese text of Debian's packages as tables for the recipes en-zh and zh-en."""
    try:
        fetch(folder)
    except (UserError, OSError) as error:
        typer.echo(f"fetch_corpora: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
