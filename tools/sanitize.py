"""Runs the tests of the native code on a build that watches its every access to memory.

    python tools/sanitize.py [TESTS]        needs g++; default: all tests of native code

The code is compiled with AddressSanitizer and UndefinedBehaviorSanitizer in a copy of the tree,
with matrix tiles as plain code, so that it is run and watched where a processor has none, and with
-O1, which compiles three times as fast and removes less of what is watched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WATCHED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TILES = "-DPH_TILE_MODEL"
COMPILER = f"""#!/bin/sh
exec g++ "$@" -O1 {WATCHED} {TILES}
"""
TESTS = [
    "tests/kernels/test_native_gate.py",
    "tests/kernels/test_native.py",
    "tests/kernels/test_native_codes.py",
    "tests/kernels/test_native_gradients.py",
    "tests/kernels/test_one_query.py",
    "tests/kernels/test_choosing.py",
    "tests/kernels/test_recurrence.py",
    "tests/native/test_rates.py",
    "tests/native/test_fastest.py",
    "tests/semantics/test_block_sparse.py",
    "tests/semantics/test_chosen.py",
    "tests/layers/test_fused.py",
    "tests/layers/test_linear.py",
    "tests/layers/test_linear_gradients.py",
    "tests/layers/test_outer_products.py",
    "tests/layers/test_quantized_layers.py",
    "tests/layers/test_int8_activations.py",
    "tests/quantization",
    "tests/layers/test_step.py",
    "tests/layers/test_step_caches.py",
    "tests/layers/test_step_choices.py",
    "tests/layers/test_step_experts.py",
    "tests/layers/test_step_rows.py",
    "tests/models/test_layer_runs.py",
    "tests/models/test_decode_plan.py",
    "tests/checkpoints/test_coded.py",
    "tests/interpret/test_statistics.py",
]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in ("src", "csrc"):
            shutil.copytree(
                ROOT / source, folder / source, ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, folder)
        compiler = folder / "watching-g++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=folder,
            env=os.environ | {"CXX": str(compiler), "POLYHEAD_NATIVE_BUILD": "all"},
            check=True,
            stderr=subprocess.DEVNULL,
        )
        if not list((folder / "src/polyhead/native").glob("_native*")):
            raise SystemExit("the native code could not be compiled: is g++ there?")
        found = (library(name) for name in ("libasan.so", "libubsan.so"))
        watching = {
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
            "PYTHONPATH": str(folder / "src"),
        }
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", "--timeout=1800", *(sys.argv[1:] or TESTS)]
        return subprocess.run(command, cwd=ROOT, env=os.environ | watching).returncode


def library(name: str) -> str:
    """Where the compiler keeps a library."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
