"""Every kernel on odd sizes under the address and undefined-behaviour sanitizers, in a program of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.translator.engine.native import ISAS
from translator.engine.native import build

DRIVER = Path(__file__).resolve().parents[2] / "native" / "driver.cpp"
SANITIZERS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def sanitized(isa: str, program: Path) -> str:
    """What the driver prints, compiled for `isa`."""
    cxx = build.compiler()
    extra = [*build.options(cxx)[isa], f'-DTRANSLATOR_ISA="{isa}"']
    options = [option for option in build.OPTIONS if option not in ("-O3", "-fPIC")]
    sources = [f"-I{build.HERE}", *map(str, build.sources()), str(DRIVER)]
    made = subprocess.run(
        [*cxx, *options, *extra, *SANITIZERS, *sources, "-o", program], text=True, capture_output=True
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], text=True, capture_output=True, env=os.environ | {"LD_PRELOAD": ""}, timeout=120)
    return done.stdout + done.stderr + (f"status {done.returncode}" if done.returncode else "")


@pytest.mark.slow
@pytest.mark.parametrize("isa", sorted({*ISAS[:1], *ISAS[-1:]}) or ["generic"])
def test_no_kernel_leaves_its_buffers(isa: str, tmp_path: Path) -> None:
    try:
        cxx, nothing = build.compiler(), tmp_path / "nothing"
    except build.NotBuilt as reason:
        pytest.skip(str(reason))
    nothing.with_suffix(".cpp").write_text("int main() {}")
    probe = [*cxx, *SANITIZERS, nothing.with_suffix(".cpp"), "-o", nothing]
    if subprocess.run(probe, capture_output=True).returncode or subprocess.run([nothing]).returncode:
        pytest.skip(f"{cxx[0]} has no sanitizers here")
    assert sanitized(isa, tmp_path / "driver") == "all right\n"
