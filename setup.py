"""Adds the native kernels to the package's build; everything else is in pyproject.toml.

Without a compiler the package is built all the same, and works with PyTorch's operators instead.
"""

import runpy
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("translator", "engine", "native")


class BuildKernels(build_ext):
    """One shared object an instruction set, loaded by the package itself: no module of Python's."""

    built: ClassVar[list[Path]] = []

    def run(self) -> None:
        build = runpy.run_path(str(NATIVE / "build.py"))
        if self.inplace or self.editable_mode:
            to, work = NATIVE, Path("build", "native")  # where build.py looks by itself
        else:
            to, work = Path(self.build_lib) / NATIVE, Path(self.build_temp)
        try:
            self.built[:] = build["build"](to.resolve(), work.resolve())
        except build["NotBuilt"] as reason:
            print(f"native kernels: not built, {' '.join(str(reason).split())[:400]}; PyTorch does their work, slower")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """The objects know no Python: one wheel serves every version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("translator.engine.native.kernels", [])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
