"""Finds, loads and types the compiled kernels. The structures mirror `kernels.h`, which says what they mean.

`TRANSLATOR_ISA` names the instruction set to use (`generic`, `avx2`, …) instead of the best that the machine can run;
`none` does without the library.
"""

import ctypes
import os
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from translator.engine.native.build import HERE, X86, object_name
from translator.errors import UserError, quoted

VERSION = 3  # of the interface
FORM = 1  # of packed weights (panels.h); a file of another one is refused
VARIABLE = "TRANSLATOR_ISA"
WITHOUT = "none"
FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)  # TrType
NO_ACTIVATION, RELU, GELU = range(3)  # TrActivation

_BUILD = "python -m translator.engine.native.build"


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """A structure's fields in the order given, as lists of names by kind."""
    types = {"pointers": c_void_p, "strides": c_int64, "numbers": c_int32, "factors": c_float}
    return [(name, types[kind.rstrip("_")]) for kind, names in kinds.items() for name in names.split()]


class Product(ctypes.Structure):
    """`TrProduct`."""

    _fields_ = _fields(
        pointers="weights x gamma beta residual y",
        strides="ldx ldr ldy",
        numbers="type activation N K T",
        factors="eps",
    )
    kind = 0


class Norm(ctypes.Structure):
    """`TrNorm`."""

    _fields_ = _fields(pointers="x gamma beta y", strides="ldx ldy", numbers="width T", factors="eps")
    kind = 1


class Cached(ctypes.Structure):
    """`TrCached`."""

    _fields_ = _fields(
        pointers="q k v keys values lengths origin home y",
        strides="ldq ldk ldv ldy ld_origin slots",
        numbers="H H_kv D_head T",
        factors="scale",
    )
    kind = 2


class Dense(ctypes.Structure):
    """`TrDense`."""

    _fields_ = _fields(
        pointers="q k v visible y",
        strides="ldq ldy k_sentence k_head k_key v_sentence v_head v_key",
        numbers="H H_kv D_head T S beams causal",
        factors="scale",
    )
    kind = 3


class Embed(ctypes.Structure):
    """`TrEmbed`."""

    _fields_ = _fields(
        pointers="ids table positions lengths y",
        numbers="type width",
        factors="scale",
    )
    kind = 4


class Advance(ctypes.Structure):
    """`TrAdvance`."""

    _fields_ = _fields(pointers="lengths")
    kind = 5


class PackedAttention(ctypes.Structure):
    """`TrPackedAttention`."""

    _fields_ = _fields(
        pointers="q k v y dq dk dv q_starts k_starts",
        strides="ldq ldk ldv ldy ld_dq ld_dk ld_dv sentences",
        numbers="type H D_head causal",
        factors="scale",
    )


class Call(ctypes.Structure):
    """`TrCall`: the address of a structure, and its `kind`."""

    _fields_ = _fields(pointers="what", strides="kind")


class Kernels:
    """One loaded object: the functions of `kernels.h` by name, without `tr_`. Pointers are passed as addresses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def typed(name: str, result: type | None, *arguments: type) -> Any:
            function = getattr(library, "tr_" + name)
            function.restype, function.argtypes = result, arguments
            return function

        self.isa: str = typed("isa", c_char_p)().decode()
        self.run = typed("run", None, c_void_p, c_int64, c_int64, c_int32)
        self.packed_bytes = typed("packed_bytes", c_int64, c_int32, c_int64, c_int64)
        self.pack = typed("pack", c_int32, c_int32, c_int64, c_int64, c_void_p, c_int32, c_void_p, c_void_p)
        self.log_z = typed("log_z", None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32)
        self.top = typed(
            "top",
            None,
            *(c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
        )
        self.packed_attention = typed("packed_attention", None, c_void_p, c_int32, c_int32)
        rows, pointers = (c_int64, c_int64), (c_void_p,)
        self.train_norm = typed("train_norm", None, *pointers * 3, c_float, *rows, c_int32, *pointers * 3, c_int32)
        self.train_norm_back = typed(
            "train_norm_back", None, c_void_p, c_int32, *pointers * 4, *rows, *pointers * 3, c_int32
        )
        self.train_residual = typed(
            "train_residual", None, c_void_p, c_int32, c_void_p, c_int64, c_uint32, c_int32, c_void_p, c_int32
        )
        self.train_residual_back = typed(
            "train_residual_back", None, c_void_p, c_int64, c_uint32, c_int32, c_void_p, c_int32, c_int32
        )
        self.train_relu = typed("train_relu", None, c_void_p, c_int32, c_int64, c_uint32, c_int32, c_int32)
        self.train_relu_back = typed("train_relu_back", None, *pointers * 2, c_int32, c_int64, c_int32, c_int32)
        self.train_loss = typed(
            "train_loss", None, c_void_p, c_int32, *rows, c_void_p, c_float, c_float, c_void_p, c_int32
        )


def supported() -> list[str]:
    """The instruction sets that are built and that this machine can run, plainest first."""
    if missing() is not None:
        return []
    plainest = _opened("generic")
    return [isa for isa in X86 if plainest.tr_supports(isa.encode()) and _path(isa).exists()]


def missing() -> str | None:
    """Why there is no library to load, or None where there is one."""
    if os.environ.get(VARIABLE) == WITHOUT:
        return f"{VARIABLE}={WITHOUT}"
    if not _path("generic").exists():
        return f"not built; with a C++ compiler, {_BUILD} does"
    try:
        _opened("generic")
    except OSError as error:
        return f"{error}; {_BUILD} builds them anew"
    except UserError as error:
        return str(error)
    return None


def available() -> bool:
    """Whether `load()` finds a library.

    Raises:
        UserError: `TRANSLATOR_ISA` names what isn't there.
    """
    if missing() is not None:
        return False
    _chosen(None)
    return True


def load(isa: str | None = None) -> Kernels:
    """The kernels for the instruction set `isa`, or that of `TRANSLATOR_ISA`, or the best that the machine can run.

    Raises:
        UserError: there is none, or not that one.
    """
    if (reason := missing()) is not None:
        raise UserError(f"there are no native kernels: {reason}")
    return _loaded(_chosen(isa))


def described() -> str:
    """What `translator --version` says of the kernels."""
    reason = missing()
    return f"native kernels {load().isa}" if reason is None else f"no native kernels ({reason})"


def _chosen(isa: str | None) -> str:
    there = supported()
    if isa is not None:
        if isa not in there:
            raise UserError(f"there are no native kernels for {quoted(isa)}; this machine has {', '.join(there)}")
        return isa
    named = os.environ.get(VARIABLE) or there[-1]
    if named not in there:
        raise UserError(f"{VARIABLE}={named}: this machine has {', '.join(there)}; {WITHOUT} does without them")
    return named


def _path(isa: str) -> Path:
    return HERE / object_name(isa)


@lru_cache
def _opened(isa: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(_path(isa)))
    if library.tr_version() != VERSION:
        raise UserError(f"{object_name(isa)} was built from other sources; {_BUILD} builds it anew")
    return library


@lru_cache
def _loaded(isa: str) -> Kernels:
    return Kernels(_opened(isa))
