"""Products and attention on matrix tiles: of the processor, and of a model of its instructions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from polyhead import native

ROOT = Path(__file__).parents[2]
CODES = [code.name for code in native.all_codes()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the comparison")
@pytest.mark.parametrize(
    ("arguments", "shapes"), [([], 2210), pytest.param(["all"], 6200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("needs", "flags"),
    [("avx512_bf16", ["-DPH_TILE_MODEL"]), ("avx512_amx", [])],
    ids=["model", "processor"],
)
def test_what_tiles_compute_is_sums_of_products(tmp_path, needs, flags, arguments, shapes):
    if needs not in CODES:
        pytest.skip(f"this processor does not run {needs}")
    program = tmp_path / "tiles"
    flags = [*flags, "-std=c++17", "-O0", "-march=x86-64-v4", "-mavx512bf16", "-Wno-psabi"]
    source = str(Path(__file__).with_name("tiles.cpp"))
    command = ["g++", *flags, f"-I{ROOT / 'csrc'}", source, "-o", str(program), "-lgomp"]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert found.stdout == f"{shapes} shapes\n"
