"""Builds the native kernels; everything else about the package is in pyproject.toml.

Each instruction set is a source file of its own, compiled for that processor and chosen at run
time. Without a C++ compiler, or where compiling fails, the package installs all the same and works
through its other kernels; ``polyhead doctor`` then says what is missing.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = [
    "-std=c++17", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-Wno-psabi",
]  # fmt: skip
PROCESSORS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    PROCESSORS |= {
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4"],
        "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    }
    PROCESSORS["avx512_amx"] = PROCESSORS["avx512_bf16"]  # tiles are written in assembly
SOURCES = ["csrc/module.cpp", *(f"csrc/{name}.cpp" for name in PROCESSORS)]


class BuildForEachProcessor(build_ext):
    """Adds the flags of an instruction set to its own file, and compiles files side by side."""

    def build_extension(self, extension: Extension) -> None:
        compile_one, link = self.compiler._compile, self.compiler.link_shared_object
        started: list[Future] = []

        def compile_for_its_processor(target, source, ext, arguments, flags, options):
            own = PROCESSORS.get(Path(source).stem, [])
            call = compile_one, target, source, ext, arguments, [*flags, *own], options
            started.append(pool.submit(*call))

        def link_what_is_compiled(*arguments, **options):
            for one in started:
                one.result()
            link(*arguments, **options)

        self.compiler._compile = compile_for_its_processor
        self.compiler.link_shared_object = link_what_is_compiled
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            super().build_extension(extension)


class StableWheel(bdist_wheel):
    """One wheel for this and every later CPython: the module keeps to the stable interface."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return ("cp311", "abi3", system) if python.startswith("cp") else (python, abi, system)


setup(
    ext_modules=[
        Extension(
            "polyhead.native._native",
            SOURCES,
            depends=[str(path) for path in Path("csrc").glob("*.h")],
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildForEachProcessor, "bdist_wheel": StableWheel},
)
