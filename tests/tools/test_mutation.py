"""The tool that counts which changes the tests notice, on a package of two functions."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random

from changes import cpp_changes, draw
from compiled import TEST_AT_FIRST_USE
from mutation import TESTS

ROOT = Path(__file__).parents[2]

FILES = {
    "src/polyhead/__init__.py": "",
    "src/polyhead/toy/__init__.py": "",
    "src/polyhead/toy/judged.py": """
def clipped(x: int, most: int) -> int:
    if x < 0:
        return 0
    return min(x, most)
""",
    "src/polyhead/toy/only_run.py": """
def total(numbers: list[int]) -> int:
    found = 0
    for number in numbers[1:]:
        found += number
    return found
""",
    "src/polyhead/toy/table.py": """
SIZES = {"small": 3}
""",
    "tests/toy/test_toy.py": """
from polyhead.toy import table
from polyhead.toy.judged import clipped
from polyhead.toy.only_run import total

def test_numbers_are_clipped():
    assert [clipped(x, 3) for x in range(-2, 6)] == [0, 0, 0, 1, 2, 3, 3, 3]

def test_a_table_that_nothing_computes():
    assert table.SIZES == {"small": 3}

def test_a_total_is_found():
    assert total([1, 2, 3]) is not total

def test_that_fails_anyhow():
    assert clipped(1, 3) == total([])
""",
}


def contents(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and ".mutation" not in p.parts)
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_changes_that_a_test_judges_are_caught_and_others_survive(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    before = contents(tmp_path)
    call = [sys.executable, str(ROOT / "tools/mutation.py"), "--root", str(tmp_path)]
    call += ["--package", "toy", "--seed", "1", "--jobs", "1", "--number", "9", "--least", "90"]
    done = subprocess.run(call, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    judged = [line.split()[0] for line in lines if "/judged.py:" in line]
    table = [line.split()[0] for line in lines if "/table.py:" in line]
    only_run = [line.split()[0] for line in lines if "/only_run.py:" in line]
    assert judged.count("caught") > 2, done.stdout + done.stderr
    assert judged.count("SURVIVES") <= 2  # `x <= 0` and `x < 1`, which change nothing
    assert set(only_run) == {"SURVIVES"}
    assert set(table) == {"caught"}
    assert any("test_that_fails_anyhow fails without any change" in line for line in lines)
    assert lines[-1].startswith(f"toy, seed 1: {len(judged + only_run + table)} drawn, ")
    assert done.returncode == 1
    assert contents(tmp_path) == before


def test_each_change_is_python_of_another_meaning_and_comes_again_with_its_seed() -> None:
    files = [ROOT / "src/polyhead/quantization/packing.py"]
    drawn = list(islice(draw(files, Random(1)), 40))
    assert drawn == list(islice(draw(files, Random(1)), 40))
    assert len({change.text for change in drawn}) == 40
    for change in drawn:
        was = change.path.read_text(encoding="utf-8")
        assert ast.dump(ast.parse(change.text)) != ast.dump(ast.parse(was))
        assert change.before != change.after
        assert change.before.split()[0] in was
        assert change.covered


def test_lines_of_cpp_that_compute_change_and_comments_do_not() -> None:
    text = '#define A 1 + 2\n// a + b\nint c = a + b;  // d < e\nif (a && b < 3) f("x + y");\n'
    found = cpp_changes(text)
    assert sorted(found) == [3, 4]
    instead = {new for line in found.values() for *_, new in line}
    assert {" - ", " || ", " <= ", "4", "2", ""} <= instead
    assert all(end <= len(text.splitlines()[n - 1]) for n, of in found.items() for *_, end, _ in of)


def test_the_test_that_would_switch_changed_code_off_is_where_it_is_removed() -> None:
    selection = ROOT / "src/polyhead/native/selection.py"
    assert TEST_AT_FIRST_USE in selection.read_text(encoding="utf-8")


def test_every_test_that_judges_changes_is_there() -> None:
    named = [each for package in TESTS.values() for each in package]
    assert [each for each in named if not (ROOT / "tests" / each).exists()] == []
