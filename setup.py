"""Builds fusedpg._core with CMake and Ninja; everything else about the package is in pyproject.toml.

FUSEDPG_NO_NATIVE=1 skips the native core: the package then has its reference and its Triton kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One CMake call; the module is written where setuptools expects it (in the source tree if editable)."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", f"-DFUSEDPG_OUTPUT_DIR={output}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_core"], check=True)


native = os.environ.get("FUSEDPG_NO_NATIVE", "0") in ("", "0")
setup(
    ext_modules=[Extension("fusedpg._core", sources=[])] if native else [],
    cmdclass={"build_ext": CMakeBuild},
)
