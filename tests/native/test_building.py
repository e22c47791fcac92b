"""setup.py where there is no compiler that can compile csrc/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from polyhead import native
from polyhead.native import gate, selection

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
if [ "$1" = --version ]; then echo "g++ (GCC) 11.4.0"; exit; fi
echo "$3: error: '__builtin_shufflevector' was not declared in this scope" >&2
exit 1
"""


@pytest.fixture
def old_compiler(tmp_path):
    compiler = tmp_path / "old-g++"
    compiler.write_text(OLD)
    compiler.chmod(0o755)
    return compiler


def build(folder, compiler, *command, **environment):
    for source in ("csrc", "src/polyhead/native"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / source, folder / source, ignore=ignore, dirs_exist_ok=True)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=folder,
        env=os.environ | {"CXX": str(compiler)} | environment,
        capture_output=True,
        text=True,
    )


def test_without_the_native_module_the_wheel_is_for_every_machine(tmp_path, old_compiler):
    system = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = tmp_path / "build" / system / "polyhead/native/_native.abi3.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an earlier build")
    done = build(tmp_path, old_compiler, "bdist_wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        # Nothing under …data/platlib: the files of a pure wheel lie at its top.
        why = content.read("polyhead/native/not_compiled.txt").decode()
        assert not [name for name in content.namelist() if name.endswith(".so")]
    assert why.startswith("g++ (GCC) 11.4.0 cannot compile the native code (portable: ")
    assert "'__builtin_shufflevector' was not declared" in why
    assert "g++ 12 or newer, or clang 14 or newer" in why
    assert why.strip() in done.stderr


def test_a_release_fails_without_the_native_module(tmp_path, old_compiler):
    arguments = "build_ext", "--inplace"
    done = build(tmp_path, old_compiler, *arguments, POLYHEAD_REQUIRE_NATIVE="1")
    assert done.returncode == 1
    assert "POLYHEAD_REQUIRE_NATIVE: g++ (GCC) 11.4.0 cannot compile" in done.stderr
    done = build(tmp_path, tmp_path / "no-compiler", *arguments)
    assert done.returncode == 0
    why = (tmp_path / "src/polyhead/native/not_compiled.txt").read_text()
    assert why.startswith("there is no C++ compiler ")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_compiler_is_tried_with_what_the_code_needs(tmp_path):
    tried = "import setup; setup.try_compiler(['g++', '-shared', '-fPIC'])"
    call = [sys.executable, "-c", f"import setuptools; setuptools.setup = lambda **_: 0; {tried}"]
    subprocess.run(call, cwd=ROOT, check=True)


def test_the_reason_is_what_the_kernel_and_doctor_say(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "__file__", str(tmp_path / "selection.py"))
    monkeypatch.setattr(gate, "MODULE", None)
    monkeypatch.setattr(gate, "DIFFERENCES", [])
    monkeypatch.setattr(selection, "code", lambda: None)
    assert native.unavailable() == (
        "not compiled: install g++ 12 or newer, or clang 14 or newer, then install polyhead again"
    )
    (tmp_path / "not_compiled.txt").write_text("g++ 11 cannot; it takes g++ 12\n")
    assert native.unavailable() == (
        "not compiled: g++ 11 cannot; it takes g++ 12, then install polyhead again"
    )


def test_a_module_compiled_from_other_sources_is_not_used_and_doctor_says_so():
    """A module without a function, or with nothing in it (None), in place of the compiled one."""
    script = """
import importlib.util, os, sys, types
import polyhead.native._native as theirs
import torch

def doctor_without(lacking):
    other = types.ModuleType("polyhead.native._native")
    if lacking:
        vars(other).update({name: getattr(theirs, name) for name in dir(theirs)})
        delattr(other, lacking)
    for name in [name for name in sys.modules if name.startswith("polyhead")]:
        del sys.modules[name]
    sys.modules["polyhead.native._native"] = other
    import polyhead as ph
    layer = ph.MultiHeadAttention(16, 2).eval()
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=ph.DenseCache())
    assert ph.native.code() is None
    from polyhead.cli import main
    sys.argv = ["polyhead", "doctor"]
    return main()

for lacking in ("stranger", None):
    child = os.fork()
    if not child:
        sys.exit(doctor_without(lacking))
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for lacking in ("stranger", "codes"):
        why = f"compiled from other sources ({lacking}: there is none); build again"
        assert why in done.stdout
