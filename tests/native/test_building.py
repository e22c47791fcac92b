"""setup.py: which codes it compiles, and what it does where no compiler can compile csrc/."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import types
import zipfile
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from setuptools import Distribution

from polyhead import native
from polyhead.cli import doctor
from polyhead.native import selection, tensor_check

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
if [ "$1" = --version ]; then echo "g++ (GCC) 11.4.0"; exit; fi
echo "$3: error: '__builtin_shufflevector' was not declared in this scope" >&2
exit 1
"""
APPLE = """#!/bin/sh
if [ "$1" = --version ]; then echo "Apple clang version 17.0.0"; exit; fi
echo "ld: library 'gomp' not found" >&2
echo "clang++: error: linker command failed with exit code 1" >&2
exit 1
"""
# Compiles nothing: notes the files of csrc/, and makes a program that says what a processor runs.
NOTING = """#!/usr/bin/env python3
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
target.write_text('#!/bin/sh\\necho "$RUNS"')
target.chmod(0o755)
with open("compiled", "a") as notes:
    print(*(pathlib.Path(each).stem for each in sys.argv if each.startswith("csrc/")), file=notes)
"""
BF16 = "avx512_bf16 avx512 avx2 portable\nfma_256=117 fma_512=118 bf16_pairs"
"""What such a program prints on a processor with instructions for bfloat16, up to their rate."""
EVERY = "avx2 avx512 avx512_amx avx512_bf16 portable"


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


def test_a_compiler_without_libgomp_is_told_from_one_that_is_too_old(tmp_path):
    apple = tmp_path / "apple-clang++"
    apple.write_text(APPLE)
    apple.chmod(0o755)
    assert build(tmp_path, apple, "build_ext", "--inplace").returncode == 0
    why = (tmp_path / "src/polyhead/native/not_compiled.txt").read_text()
    assert why.startswith("Apple clang version 17.0.0 cannot compile the native code (portable: ")
    assert "library 'gomp' not found); it takes g++ 12" in why
    assert why.endswith("with libgomp (CXX names another compiler), then install polyhead again\n")


def test_a_release_fails_without_the_native_module(tmp_path, old_compiler):
    arguments = "build_ext", "--inplace"
    done = build(tmp_path, old_compiler, *arguments, POLYHEAD_REQUIRE_NATIVE="1")
    assert done.returncode == 1
    assert "POLYHEAD_REQUIRE_NATIVE: g++ (GCC) 11.4.0 cannot compile" in done.stderr
    done = build(tmp_path, tmp_path / "no-compiler", *arguments)
    assert done.returncode == 0
    why = (tmp_path / "src/polyhead/native/not_compiled.txt").read_text()
    assert why.startswith("there is no C++ compiler ")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one code, the portable one")
@pytest.mark.parametrize(
    ("command", "chosen", "runs", "expected"),
    [
        (("build_ext", "--inplace"), "", "avx512 avx2 portable", "avx512 portable"),
        (("build_ext", "--inplace"), "", f"{BF16}=236", "avx512_bf16 portable"),
        (("build_ext", "--inplace"), "", f"{BF16}=89", "avx512 avx512_bf16 portable"),
        (("build_ext", "--inplace"), "all", "avx512 avx2 portable", EVERY),
        (("build_ext",), "", "avx512 avx2 portable", EVERY),
        (("build_ext",), "avx2", "avx512 avx2 portable", "avx2 portable"),
    ],
)
def test_a_module_that_stays_here_has_the_best_code_and_a_wheel_has_all(
    tmp_path, command, chosen, runs, expected
):
    noting = tmp_path / "noting-g++"
    noting.write_text(NOTING)
    noting.chmod(0o755)
    done = build(tmp_path, noting, *command, POLYHEAD_NATIVE_BUILD=chosen, RUNS=runs)
    assert done.returncode == 0, done.stderr
    compiled = set((tmp_path / "compiled").read_text().split())
    assert " ".join(sorted(compiled - {"module"})) == expected


def test_a_code_that_there_is_not_is_named(tmp_path, old_compiler):
    done = build(tmp_path, old_compiler, "build_ext", POLYHEAD_NATIVE_BUILD="avx2,avx1024")
    assert done.returncode == 1
    assert "POLYHEAD_NATIVE_BUILD must be all, native, or names" in done.stderr
    assert done.stderr.rstrip().endswith("avx1024")


def test_on_windows_nothing_is_compiled_and_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.delenv("POLYHEAD_REQUIRE_NATIVE", raising=False)
    building = runpy.run_path(str(ROOT / "setup.py"))
    command = building["BuildForEachProcessor"](Distribution())
    command.compiler = types.SimpleNamespace(compiler_type="msvc")
    with pytest.raises(building["CompileError"], match="not built on Windows; in WSL"):
        command.build_extension(building["Extension"](building["NAME"], []))
    assert command.why_not.startswith("the native code is not built on Windows")


@pytest.mark.parametrize(
    ("codes", "age", "environment", "kept"),
    [
        ("avx2 portable", 10, {}, True),
        ("avx512 avx2 portable", 10, {}, True),
        ("portable", 10, {}, False),
        ("avx2 portable", -10, {}, False),
        ("avx2 portable", 10, {"CXX": "clang++"}, False),
        ("avx2 portable", 10, {"CXXFLAGS": "-O1"}, False),
    ],
)
def test_what_is_compiled_stays_until_its_sources_or_flags_change(
    tmp_path, monkeypatch, codes, age, environment, kept
):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    building = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.chdir(tmp_path)
    module = Path("src/polyhead/native/_native.abi3.so")
    module.parent.mkdir(parents=True)
    extension = building["Extension"](building["NAME"], ["module.cpp"], depends=["rows.h"])
    names = ["avx2", "portable"]
    for variable in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    assert building["built_before"](module.name, extension, names) is None
    module.write_bytes(f"polyhead codes:{codes};".encode())
    for source in ("module.cpp", "rows.h", "setup.py"):
        Path(source).touch()
    then = Path("rows.h").stat().st_mtime + age
    os.utime(module, (then, then))
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    found = building["built_before"](module.name, extension, names)
    assert found == (module if kept else None)


@pytest.mark.skipif(native.code() is None, reason="no native code was compiled here")
def test_a_module_built_earlier_names_its_codes(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    codes_in = runpy.run_path(str(ROOT / "setup.py"))["codes_in"]
    names = {name for name, _ in tensor_check.MODULE.codes()}
    assert codes_in(Path(tensor_check.MODULE.__file__)) == names
    assert codes_in(Path(__file__).with_name("none.so")) == set()


@pytest.mark.skipif(tensor_check.MODULE is None, reason="no native code was compiled here")
def test_no_code_is_switched_off():
    # Other tests of native code are skipped where it is.
    native.all_codes()
    assert native.switched_off() == {}


@pytest.mark.skipif(native.code() is None, reason="no native code was compiled here")
def test_doctor_names_the_best_code_that_was_left_out(monkeypatch):
    names = [name for name, runs_here in tensor_check.MODULE.codes() if runs_here]
    assert (native.left_out() is None) == (tensor_check.MODULE.best() == names[0])
    native.all_codes()
    monkeypatch.setattr(tensor_check, "MODULE", types.SimpleNamespace(best=lambda: "avx1024"))
    report = doctor.machine()
    assert report["native_code_left_out"] == "avx1024"
    doctor._show(doctor.examine() | {"machine": report}, Console(file=(screen := StringIO())))
    assert "avx1024, the best for this processor" in screen.getvalue()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_compiler_is_tried_with_what_the_code_needs(tmp_path):
    tried = "import setup; setup.try_compiler(['g++', '-shared', '-fPIC'], [*setup.PROCESSORS])"
    call = [sys.executable, "-c", f"import setuptools; setuptools.setup = lambda **_: 0; {tried}"]
    subprocess.run(call, cwd=ROOT, check=True)


def test_the_reason_is_what_the_kernel_and_doctor_say(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "__file__", str(tmp_path / "selection.py"))
    monkeypatch.setattr(tensor_check, "MODULE", None)
    monkeypatch.setattr(tensor_check, "DIFFERENCES", [])
    monkeypatch.setattr(selection, "code", lambda: None)
    assert native.unavailable() == (
        "not compiled: install g++ 12 or newer, or clang 14 or newer, then install polyhead again"
    )
    (tmp_path / "not_compiled.txt").write_text("g++ 11 cannot; it takes g++ 12\n")
    assert native.unavailable() == "not compiled: g++ 11 cannot; it takes g++ 12"


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

for lacking in ("unsupported_tensor_kind", None):
    child = os.fork()
    if not child:
        sys.exit(doctor_without(lacking))
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for lacking in ("unsupported_tensor_kind", "codes"):
        why = f"compiled from other sources ({lacking}: there is none); build again"
        assert why in done.stdout
