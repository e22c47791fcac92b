"""Every header of csrc/ includes what it uses: compilers and editors understand it alone."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HEADERS = sorted((Path(__file__).parents[2] / "csrc").rglob("*.h"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_header_compiles_alone():
    call = ["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{sysconfig.get_path('include')}"]

    def said(header):
        text = header.read_text(encoding="utf-8")
        assert "\n#pragma once\n" in text, header
        command = [*call, "-x", "c++", str(header)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    with ThreadPoolExecutor() as pool:
        assert not [each for each in pool.map(said, HEADERS) if each]
