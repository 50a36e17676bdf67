"""How the kernels are found, chosen and called: what is loaded, by how many at once, after a fork, and without any."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.translator.engine.native import ISAS, attend_dense, each_isa, run
from translator.engine.native import build, library
from translator.errors import UserError

needs_kernels = pytest.mark.skipif(not ISAS, reason="no native kernels are built")
STRUCTURES = (library.Product, library.Norm, library.Cached, library.Dense, library.Call)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test chooses for itself."""
    monkeypatch.delenv(library.VARIABLE, raising=False)


def compiled(source: str, program: Path) -> str:
    """What a C++ program prints."""
    try:
        cxx = build.compiler()
    except build.NotBuilt as reason:
        pytest.skip(str(reason))
    program.with_suffix(".cpp").write_text(source)
    command = [*cxx, "-std=c++17", f"-I{build.HERE}", str(program.with_suffix(".cpp")), "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([program], check=True, text=True, capture_output=True).stdout


def test_structures_lie_as_the_header_says(tmp_path: Path) -> None:
    lines = []
    for structure in STRUCTURES:
        name = f"Tr{structure.__name__}"
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:
            at = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'std::printf("{name}.{field} %zu %zu\\n", {at});')
    source = '#include <cstddef>\n#include <cstdio>\n#include "kernels.h"\nint main() {' + "\n".join(lines) + "}"
    wanted = []
    for structure in STRUCTURES:
        name = f"Tr{structure.__name__}"
        wanted.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            wanted.append(f"{name}.{field} {place.offset} {place.size}")
    assert compiled(source, tmp_path / "layout").splitlines() == wanted


@each_isa
def test_the_variable_names_what_is_used(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, isa)
    assert library.available() and library.load().isa == isa
    assert library.described() == f"native kernels {isa}"


@needs_kernels
def test_the_best_is_used_by_default() -> None:
    assert library.load().isa == ISAS[-1]
    assert [isa for isa in build.X86 if isa in ISAS] == ISAS


@needs_kernels
@pytest.mark.parametrize("name", ["avx3", "AVX2", "sse\n2"])
def test_a_name_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, name)
    for use in (library.available, library.load, library.described):
        with pytest.raises(UserError, match=f"TRANSLATOR_ISA.*this machine has generic.*{library.WITHOUT}"):
            use()
    with pytest.raises(UserError, match="this machine has generic"):
        library.load("sse9")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, library.WITHOUT)
    assert not library.available() and library.supported() == []
    assert library.described() == "no native kernels (TRANSLATOR_ISA=none)"
    with pytest.raises(UserError, match="no native kernels"):
        library.load()


def test_a_library_that_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert not library.available()
    assert "not built" in library.described()


@needs_kernels
def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", -1)
    library._opened.cache_clear()
    try:
        assert not library.available()
        assert "built from other sources" in library.described()
    finally:
        library._opened.cache_clear()


def test_a_build_without_a_compiler_says_so_in_one_line() -> None:
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, build.__file__], env=environment, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no-such-compiler" in done.stderr


@each_isa
def test_several_callers_at_once(isa: str) -> None:
    kernels, failures = library.load(isa), []
    q, k, v = (torch.randn(4, size, 8, 32, generator=torch.Generator().manual_seed(size)) for size in (9, 30, 31))
    q, k, v = q.contiguous(), k[:, :29].transpose(1, 2), v[:, :29].transpose(1, 2)
    wanted = attend_dense(kernels, q, k, v)

    def call(threads: int) -> None:
        for _ in range(60):
            if not torch.equal(attend_dense(kernels, q, k, v, threads=threads), wanted):
                failures.append(threads)

    callers = [threading.Thread(target=call, args=(threads,)) for threads in (1, 2, 3, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not failures


@each_isa
def test_a_call_waits_for_the_one_before(isa: str) -> None:
    kernels, size, where = library.load(isa), 48, torch.Tensor.data_ptr
    x, q = torch.randn(2, 64, size, generator=torch.Generator().manual_seed(1))
    normed, y = torch.empty(64, size), torch.empty(64, size)
    norm = library.Norm(x=where(x), y=where(normed), ldx=size, ldy=size, width=size, T=64, eps=1e-5)
    attend = library.Dense(
        q=where(q), k=where(normed), v=where(normed), y=where(y), ldq=size, ldy=size, k_key=size, v_key=size, H=1,
        H_kv=1, D_head=size, T=64, S=64, beams=1, scale=0.1,
    )  # fmt: skip
    run(kernels, [norm, attend], 1)
    wanted = y.clone()
    for _ in range(200):
        normed.fill_(float("nan"))
        run(kernels, [norm, attend], 1, threads=3)
        assert torch.equal(y, wanted)


@each_isa
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_after_a_fork(isa: str) -> None:
    kernels = library.load(isa)
    q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 4, 9, 8)
    wanted = attend_dense(kernels, q, k, k, threads=3)  # the parent's threads are there by now
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # rather than wait forever for threads that the child doesn't have
        os._exit(0 if torch.equal(attend_dense(kernels, q, k, k, threads=3), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(attend_dense(kernels, q, k, k, threads=3), wanted)


@each_isa
@pytest.mark.parametrize("threads", [0, 1, 200])
def test_any_number_of_threads(isa: str, threads: int) -> None:
    kernels = library.load(isa)
    q, k = torch.ones(1, 1, 2, 8), torch.ones(1, 2, 9, 8)
    assert torch.equal(attend_dense(kernels, q, k, k, threads=threads), attend_dense(kernels, q, k, k))
