"""Compiles the kernels, one shared object an instruction set: `python -m translator.engine.native.build [avx2 …]`.

Run by `scripts/setup` and by the package's own build (`setup.py`), so it imports nothing but the standard library. Only
what is older than its source is compiled again. `CXX` names another compiler.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What x86 objects are compiled with beyond `OPTIONS`, plainest first: the last one that the machine can run is used.
X86 = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
X86["avx512vnni"] = [*X86["avx512"], "-mavx512vnni"]
X86["amx"] = [*X86["avx512vnni"], "-mamx-tile", "-mamx-int8"]
# Sums keep their order and their roundings: no fast-math, and a product joins a sum only where the source says so.
OPTIONS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra"]


class NotBuilt(Exception):
    """There is no compiler, or it refused; the message says so."""


def object_name(isa: str) -> str:
    """The shared object's file name."""
    return f"kernels_{isa}.so"


def sources() -> list[Path]:
    """The files that are compiled."""
    return sorted(HERE.glob("*.cpp"))


def compiler() -> list[str]:
    """The C++ compiler's command.

    Raises:
        NotBuilt: there is none.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]):
            return named
        raise NotBuilt(f"CXX names {named[0]}, and there is no such program")
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise NotBuilt("there is no C++ compiler (g++, clang++, or one that CXX names)")


def options(cxx: Sequence[str]) -> dict[str, list[str]]:
    """The options of each instruction set that the compiler knows for the machine it compiles for."""
    target = _run([*cxx, "-dumpmachine"]).strip()
    if not target.startswith(("x86_64", "amd64")):
        return {"generic": []}
    return {isa: extra for isa, extra in X86.items() if _knows(cxx, extra)}


def build(to: Path, work: Path, isas: Sequence[str] = ()) -> list[Path]:
    """Compiles what is out of date, in `work`, and puts the objects into `to`; returns their paths.

    Raises:
        NotBuilt: no compiler, an unknown instruction set, or an error in the sources.
    """
    cxx = compiler()
    known = options(cxx)
    if unknown := set(isas) - set(known):
        raise NotBuilt(f"{cxx[0]} compiles for {', '.join(known)}, not for {', '.join(sorted(unknown))}")
    headers = max(path.stat().st_mtime for path in [*HERE.glob("*.h"), Path(__file__)])
    compiling, linking = [], []
    for isa in isas or known:
        flags = [*OPTIONS, *WARNINGS, *known[isa], f'-DTRANSLATOR_ISA="{isa}"']
        parts = []
        for source in sources():
            part = work / isa / f"{source.stem}.o"
            parts.append(part)
            if _time(part) <= max(headers, source.stat().st_mtime):
                compiling.append(_job([*cxx, *flags, "-c", str(source)], part))
        linking.append((to / object_name(isa), parts))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: job(), compiling))
    for shared, parts in linking:
        if _time(shared) <= max(map(_time, parts)):
            _job([*cxx, "-shared", "-pthread", *map(str, parts)], shared)()
    return [shared for shared, _ in linking]


def _job(command: list[str], to: Path) -> Callable[[], None]:
    """Makes `to` all at once: programs that run have the old one in memory."""

    def run() -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        partial = to.with_name(f"{to.name}.{os.getpid()}")
        try:
            sys.stderr.write(_run([*command, "-o", str(partial)]))
            partial.replace(to)
        finally:
            partial.unlink(missing_ok=True)

    return run


def _run(command: list[str]) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise NotBuilt(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


def _knows(cxx: Sequence[str], flags: Sequence[str]) -> bool:
    try:
        _run([*cxx, *flags, "-x", "c++", "-fsyntax-only", os.devnull])
    except NotBuilt:
        return False
    return True


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0


def main() -> int:
    """Builds beside the sources; without a compiler says so in one line."""
    try:
        compiler()
    except NotBuilt as reason:
        print(f"native kernels: not built, {reason}; PyTorch does their work, slower", file=sys.stderr)
        return 0
    try:
        build(HERE, HERE.parents[2] / "build" / "native", sys.argv[1:])
    except NotBuilt as reason:
        print(f"native kernels: not built: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
