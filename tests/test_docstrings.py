"""``Args:`` of a docstring name what the signature names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import polyhead

ROOT = Path(polyhead.__file__).parent
SECTION = re.compile(r"\n *Args:\n(.*?)(?:\n *\n *\w+:\n|\Z)", re.DOTALL)
ENTRY = re.compile(r" *\*{0,2}(\w+)(?: \([^)]*\))?:")


def documented(docstring: str) -> list[str]:
    """The names under ``Args:``, those of the least indentation."""
    section = SECTION.search(docstring)
    lines = [line for line in section[1].split("\n") if line.strip()] if section else []
    indents = [len(line) - len(line.lstrip()) for line in lines]
    names = []
    for line, indent in zip(lines, indents, strict=True):
        if indent == min(indents) and (entry := ENTRY.match(line)):
            names.append(entry[1])
    return names


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    a = function.args
    rest = [each for each in (a.vararg, a.kwarg) if each is not None]
    return {each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest)}


def described(tree: ast.Module) -> Iterator[tuple[str, str, set[str]]]:
    """Name, docstring and possible arguments of every function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, ast.get_docstring(node) or "", parameters(node)
        elif isinstance(node, ast.ClassDef):
            body = node.body
            makers = [f for f in body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
            fields = {
                f.target.id
                for f in body
                if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            }
            if makers or fields:
                taken = fields.union(*map(parameters, makers))
                yield node.name, ast.get_docstring(node) or "", taken


def test_documented_arguments_exist() -> None:
    stale, count = [], 0
    for file in sorted(ROOT.rglob("*.py")):
        for name, docstring, taken in described(ast.parse(file.read_text(encoding="utf-8"))):
            found = documented(docstring)
            count += len(found)
            place = f"{file.relative_to(ROOT)}: {name}"
            stale += [f"{place} has no {each!r}" for each in found if each not in taken]
    assert stale == []
    assert count > 1000
