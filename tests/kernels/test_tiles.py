"""Products and attention on matrix tiles: of the processor, or of a model of its instructions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from polyhead import native

ROOT = Path(__file__).parents[2]
CODES = [code.name for code in native.all_codes()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the comparison")
@pytest.mark.skipif(
    {"avx512_bf16", "avx512_amx"}.isdisjoint(CODES),
    reason="no code here multiplies pairs by 512 bits",
)
def test_what_tiles_compute_is_sums_of_products(tmp_path):
    program = tmp_path / "tiles"
    of = [] if "avx512_amx" in CODES else ["-DPH_TILE_MODEL"]
    flags = [*of, "-std=c++17", "-O0", "-march=x86-64-v4", "-mavx512bf16", "-Wno-psabi"]
    source = str(Path(__file__).with_name("tiles.cpp"))
    command = ["g++", *flags, f"-I{ROOT / 'csrc'}", source, "-o", str(program), "-lgomp"]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert found.stdout == "1880 shapes\n"
