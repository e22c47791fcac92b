"""Products on matrix tiles, with a model of the instructions where the processor lacks them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from polyhead import native

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the comparison")
@pytest.mark.skipif(
    not any(code.name == "avx512_bf16" for code in native.all_codes()),
    reason="the rest of that code needs AVX-512 with bfloat16 products",
)
def test_products_on_tiles_are_sums_of_products(tmp_path):
    program = tmp_path / "tiles"
    flags = ["-std=c++17", "-O1", "-march=x86-64-v4", "-mavx512bf16", "-Wno-psabi"]
    source = str(Path(__file__).with_name("tiles.cpp"))
    command = ["g++", *flags, f"-I{ROOT / 'csrc'}", source, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert found.stdout == "3840 shapes\n"
