"""Builds the native code with one file changed, for the instruction set that this machine runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from functools import cached_property
from pathlib import Path

FLAGS = [
    "-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-Wno-psabi", "-w",
]  # fmt: skip
LEVELS = {"portable": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
LEVELS["avx512_bf16"] = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"]
LEVELS["avx512_amx"] = LEVELS["avx512_bf16"]


TEST_AT_FIRST_USE = "elsewhere.submit(disagreement, candidate).result()"
"""In ``native/selection.py``; without it a wrong code computes, and tests have to notice."""


class Compiled:
    """The module of a changed csrc/; objects of files that the change does not reach are kept."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache = root, cache / "objects"
        self.cache.mkdir(exist_ok=True)

    @cached_property
    def name(self) -> str:
        code = "from polyhead.native.selection import all_codes; print(all_codes()[0].name)"
        call = [sys.executable, "-c", code]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    @cached_property
    def _module(self) -> Path:
        return next((self.root / "src/polyhead/native").glob("_native*.so"))

    def unchanged(self) -> dict[Path, bytes]:
        built = self.built({}, same=True)
        if built is None:
            raise SystemExit("csrc/ does not compile as it is")
        return built

    def built(self, changed: dict[Path, bytes], same: bool = False) -> dict[Path, bytes] | None:
        """The files of the package that change; None if the compiler refuses, or sees no change."""
        objects = self._objects_of(changed)
        if None in objects or (not same and objects == self._unchanged_objects):
            return None
        with tempfile.TemporaryDirectory() as name:
            target = Path(name) / "module.so"
            link = ["g++", "-shared", "-o", str(target), *map(str, objects), "-lgomp"]
            subprocess.run(link, check=True)
            library = target.read_bytes()
        selection = self.root / "src/polyhead/native/selection.py"
        tested = selection.read_text(encoding="utf-8")
        if TEST_AT_FIRST_USE not in tested:
            raise SystemExit(f"{selection}: the test at first use is not where it was")
        untested = tested.replace(TEST_AT_FIRST_USE, "None")
        return {self._module: library, selection: untested.encode()}

    @cached_property
    def _unchanged_objects(self) -> list[Path | None]:
        return self._objects_of({})

    def _objects_of(self, changed: dict[Path, bytes]) -> list[Path | None]:
        """The object files of a changed csrc/; None for one that does not compile."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for path in (path for path in (self.root / "csrc").rglob("*") if path.is_file()):
                copy = folder / path.relative_to(self.root / "csrc")
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(changed.get(path, path.read_bytes()))
            files = f"instruction_sets/{self.name}", "module/module"
            return [self._object(folder, file) for file in files]

    def _object(self, folder: Path, name: str) -> Path | None:
        """The object file, named by its content."""
        call = [
            "g++", *FLAGS, *LEVELS.get(Path(name).name, []), f"-I{sysconfig.get_path('include')}",
            "-DPy_LIMITED_API=0x030B0000", f"-DPH_CODES(X)=X({self.name})",
            "-E", "-P", f"{folder}/{name}.cpp",
        ]  # fmt: skip
        done = subprocess.run(call, capture_output=True)
        if done.returncode:
            return None
        source = hashlib.sha256(done.stdout + str(call[1:-1]).encode()).hexdigest()
        link = self.cache / f"{source}.source"
        if not link.exists():
            target = folder / f"{name}.o"
            call = [*call[:-3], "-x", "c++", "-c", f"{folder}/{name}.cpp", "-o", str(target)]
            if subprocess.run(call, capture_output=True).returncode:
                return None
            content = hashlib.sha256(target.read_bytes()).hexdigest()
            (self.cache / f"{content}.o").write_bytes(target.read_bytes())
            link.write_text(content)
        return self.cache / f"{link.read_text()}.o"
