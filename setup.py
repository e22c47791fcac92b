"""Builds the native kernels; everything else about the package is in pyproject.toml.

Each instruction set is a source file of its own, compiled for that processor and chosen at run
time. A wheel has all of them. A module that stays where it is built (``pip install -e``,
``build_ext --inplace``) has the best one for this processor and the portable one, which takes a
third of the time; where instructions for bfloat16 are slow also the one without them, between which
``native.fastest`` chooses. POLYHEAD_NATIVE_BUILD says otherwise: ``all``, ``native`` or names.

Without a C++ compiler, or where compiling fails, the package installs all the same, as a
wheel for every machine, and works through its other kernels; ``native/not_compiled.txt`` keeps the
reason, which ``polyhead doctor`` shows. With POLYHEAD_REQUIRE_NATIVE=1 the build fails instead.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

NAME = "polyhead.native._native"
NEEDED = (
    "it takes g++ 12 or newer, or clang 14 or newer, with libgomp (CXX names another compiler), "
    "then install polyhead again"
)
NOT_ON_WINDOWS = "the native code is not built on Windows; in WSL, which is Linux, it is"
FLAGS = [
    "-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=fast",
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
    # Only processors older than AVX2 run it: the same bits, compiled in a third of the time.
    PROCESSORS["portable"] = ["-O1"]
if platform.machine() in ("aarch64", "arm64"):
    PROCESSORS |= {
        "neon_dot": ["-march=armv8.2-a+dotprod"],
        "neon_bf16": ["-march=armv8.2-a+dotprod+bf16+i8mm"],
    }
LIBRARIES = ["-lgomp"]
# What compilers lack that are too old, and the library of threads.
PROBE = """
#include <cstdint>
typedef float Vec __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(4)));
extern "C" int omp_get_num_threads(void);
Vec probe(Vec a, Vec b, Bytes c) {
    a = a > b ? a : b + __builtin_convertvector(c, Vec);
    return __builtin_shufflevector(a, b, 0, 4, 1, 5) * (float)omp_get_num_threads();
}
"""
# Prints which codes this processor runs, the best first, and the GOP/s of each instruction.
RUNS = """
#include <algorithm>
#include <chrono>
#include <cstdio>
#include "instruction_sets/rates.h"
using Clock = std::chrono::steady_clock;
#define PRINT(name) if (polyhead::runs_##name()) std::printf("%s ", #name);
int main() {
    PH_EVERY_CODE(PRINT)
    std::puts("");
    for (const polyhead::Rate& rate : polyhead::kRates) {
        double best = 0;
        for (int turn = 0; turn < 20 && rate.runs_here(); ++turn) {
            const auto begin = Clock::now();
            const double done = rate.compute(20000);
            const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
            best = std::max(best, done / taken.count());
        }
        std::printf("%s=%.1f ", rate.name, best);
    }
}
"""
SLOW_PAIRS = 1.5
"""Pairs of bfloat16 below so many times the rate of float32 (2 on a Zen 4, 0.5 on some Xeons)."""
MODULE = "csrc/module/module.cpp"


class BuildForEachProcessor(build_ext):
    """Adds the flags of an instruction set to its own file, and compiles files side by side."""

    why_not = ""
    codes = "all"

    stays = False

    def run(self) -> None:
        if self.inplace:  # which is 0 while extensions are built
            self.codes, self.stays = "native", True
        super().run()
        module = Path(self.get_ext_fullpath(NAME))
        reason = module.with_name("not_compiled.txt")
        reason.unlink(missing_ok=True)
        if self.why_not:
            if not self.inplace:
                module.unlink(missing_ok=True)  # left in build/ by an earlier build
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(self.why_not + "\n", encoding="utf-8")

    def build_extension(self, extension: Extension) -> None:
        try:
            self.compile_codes(extension)
        except (BaseError, CompileError, LinkError, OSError) as error:
            self.why_not = str(error)
            if os.environ.get("POLYHEAD_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise SystemExit(f"POLYHEAD_REQUIRE_NATIVE: {error}") from error
            raise CompileError(self.why_not) from error

    def compile_codes(self, extension: Extension) -> None:
        compiler = getattr(self.compiler, "compiler_so_cxx", None)
        if compiler is None or os.name == "nt":  # MSVC's has another interface
            raise CompileError(NOT_ON_WINDOWS)
        names = chosen_codes(compiler, self.codes)
        # Of equal inline functions the linker keeps the first, which runs on every processor.
        extension.sources = [
            MODULE,
            *(f"csrc/instruction_sets/{name}.cpp" for name in reversed(names)),
        ]
        extension.define_macros = [("PH_CODES(X)", " ".join(f"X({name})" for name in names))]
        target = Path(self.get_ext_fullpath(NAME))
        if self.stays and (built := built_before(target.name, extension, names)) is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, target)
            return
        if not set(names) <= codes_in(target):
            self.force = True
        try_compiler(compiler, names)
        self.compile_side_by_side(extension)

    def compile_side_by_side(self, extension: Extension) -> None:
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


def chosen_codes(compiler: list[str], default: str) -> list[str]:
    """Names of the codes to compile, the portable one always among them."""
    chosen = os.environ.get("POLYHEAD_NATIVE_BUILD") or default
    if chosen == "native":
        chosen = ",".join(codes_for_here(compiler)) or "all"
    wanted = set(PROCESSORS) if chosen == "all" else set(chosen.split(","))
    if unknown := sorted(wanted - set(PROCESSORS)):
        raise SystemExit(
            f"POLYHEAD_NATIVE_BUILD must be all, native, or names with commas among "
            f"{', '.join(PROCESSORS)}: got {', '.join(unknown)}"
        )
    return [name for name in PROCESSORS if name in wanted | {"portable"}][::-1]


def codes_for_here(compiler: list[str]) -> list[str]:
    """The best code that this processor runs, and the one beside it; empty: nobody can tell."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "runs.cpp"), Path(folder, "runs")
        source.write_text(RUNS, encoding="utf-8")
        command = [*compiler, "-std=c++17", "-O2", "-Icsrc", str(source), "-o", str(program)]
        try:
            subprocess.run(command, check=True, capture_output=True)
            done = subprocess.run([program], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            return []
    return worth_compiling(done.stdout)


def worth_compiling(measured: str) -> list[str]:
    """The codes to compile of those that RUNS printed, given the rates that it printed."""
    names, _, pairs = measured.partition("\n")
    best, *others = names.split()
    rates = {name: float(rate) for name, _, rate in (pair.partition("=") for pair in pairs.split())}
    slow = rates.get("bf16_pairs", 0.0) < SLOW_PAIRS * rates.get("fma_512", 0.0)
    beside = best in ("avx512_bf16", "avx512_amx") and slow and "avx512" in others
    return [best, "avx512"] if beside else [best]


def built_before(name: str, extension: Extension, names: list[str]) -> Path | None:
    """The module that lies in the source tree, if it is newer than what it is made of.

    ``pip install -e`` builds in a new folder each time, where setuptools finds nothing to keep. A
    compiler or flags that the environment names are obeyed.
    """
    built = Path("src", *NAME.split(".")[:-1], name)
    if {"CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"} & set(os.environ):
        return None
    if not set(names) <= codes_in(built):
        return None
    made_of = [*extension.sources, *extension.depends, "setup.py"]
    newest = max(Path(each).stat().st_mtime for each in made_of)
    return built if built.stat().st_mtime > newest else None


def codes_in(module: Path) -> set[str]:
    """Names of the codes in a module that was built earlier."""
    content = module.read_bytes() if module.exists() else b""
    named = re.search(rb"polyhead codes:([a-z0-9_ ]+);", content)
    return set(named[1].decode().split()) if named else set()


def try_compiler(command: list[str], names: list[str]) -> None:
    """Compiles and links a few lines for each processor, or says what is wrong in a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(PROBE, encoding="utf-8")
        target = ["-shared", "-o", str(source.with_suffix(".so")), str(source), *LIBRARIES]
        for name in reversed(names):
            try:
                call = [*command, *FLAGS, *PROCESSORS[name], *target]
                done = subprocess.run(call, capture_output=True, text=True, errors="replace")
            except OSError as error:
                raise CompileError(f"there is no C++ compiler {command[0]!r}; {NEEDED}") from error
            if done.returncode:
                # A linker that finds no libgomp, as Apple's, says "error" only behind that.
                said = done.stderr.splitlines()
                lines = [line for line in said if "error" in line or "gomp" in line]
                first = (lines or ["no message"])[0].replace(f"{folder}/", "")
                raise CompileError(
                    f"{version_of(command[0])} cannot compile the native code ({name}: {first}); "
                    f"{NEEDED}"
                )


def version_of(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace")
    return (done.stdout.splitlines() or [compiler])[0]


class StableWheel(bdist_wheel):
    """One wheel for this and every later CPython: the module keeps to the stable interface.

    Without the module it is a wheel for every machine.
    """

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build" and self.get_finalized_command("build_ext").why_not:
            self.root_is_pure, self.distribution.ext_modules = True, []

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return ("cp311", "abi3", system) if python.startswith("cp") else (python, abi, system)


setup(
    ext_modules=[
        Extension(
            NAME,
            [MODULE],
            depends=[str(path) for path in Path("csrc").rglob("*.h")],
            extra_compile_args=FLAGS,
            extra_link_args=LIBRARIES,
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildForEachProcessor, "bdist_wheel": StableWheel},
)
