"""Builds the sdist and the wheels, checks them, and tries them in bare environments.

    python tools/dist.py [PYTHON ...]

Needs ``build``, ``twine`` and ``abi3audit`` (``make dist`` installs them). The wheel is installed
in an empty environment of each named Python (default: this one), the sdist in one without a
compiler.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CODES = b"portable;"
if platform.machine() == "x86_64":
    CODES = b"avx512_amx avx512_bf16 avx512 avx2 " + CODES


def run(*command: str | Path, **changes: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, env=os.environ | changes)


def check(wheel: Path, *, native: bool) -> None:
    """A wheel with native code names its platform, one without serves every machine."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]
    pure = wheel.name.endswith("-py3-none-any.whl")
    if native != bool(modules) or native == pure:
        sys.exit(f"{wheel.name} holds {modules or 'no native code'}: its name says otherwise")
    if native:
        with zipfile.ZipFile(wheel) as archive:
            if b"polyhead codes: " + CODES not in archive.read(modules[0]):
                sys.exit(f"{wheel.name} does not have every native code")
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def try_in_bare_environment(python: str, package: Path, flag: str, **changes: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        inside = Path(folder, "bin", "python")
        run(
            inside, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", package, **changes
        )
        run(inside, ROOT / "tools" / "smoke.py", flag)


def main(pythons: list[str]) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--outdir", DIST]
    run(*build, "--sdist")
    run(*build, "--wheel", POLYHEAD_REQUIRE_NATIVE="1")
    (wheel,) = DIST.glob("*.whl")
    check(wheel, native=True)
    (source,) = DIST.glob("*.tar.gz")
    pure = DIST / "pure"
    run(*build[:-1], pure, "--wheel", CC="/no/compiler", CXX="/no/compiler")
    (portable,) = pure.glob("*.whl")
    check(portable, native=False)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    for python in pythons or [sys.executable]:
        try_in_bare_environment(python, wheel, "--native")
    no_compiler = {"CC": "/no/compiler", "CXX": "/no/compiler"}
    try_in_bare_environment(sys.executable, source, "--pure", **no_compiler)
    print(*sorted(path.relative_to(ROOT) for path in DIST.rglob("*") if path.is_file()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
