"""What docs/reference/ must have, read off the package and off the code of the pages."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyhead as ph

DOCS = Path(__file__).parents[1] / "docs"


def documented() -> dict[str, Any]:
    """Names behind ``polyhead.`` that a page of the reference describes, and what they are."""
    named: dict[str, Any] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: polyhead\.(\S+)$", page.read_text(encoding="utf-8"), re.M):
            named[name] = _of(name)
    return named


def _of(name: str) -> Any:
    module, _, last = f"polyhead.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except ModuleNotFoundError:
        return operator.attrgetter(name)(ph)


def imported_by_pages() -> Iterator[tuple[str, Any]]:
    """Names that the code of README.md and of the pages imports from polyhead's modules."""
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for code in re.findall(r"```py\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyhead"):
                    module = importlib.import_module(node.module or "")
                    for alias in node.names:
                        yield f"{node.module}.{alias.name}", _member(module, alias.name)


def _member(module: Any, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    return importlib.import_module(f"{module.__name__}.{name}")


def returned(thing: Any) -> set[type]:
    """Public classes of polyhead that a function, or a method of a class, says that it returns."""
    functions = [thing]
    if inspect.isclass(thing):
        functions = [
            getattr(each, "fget", each)
            for name, each in vars(thing).items()
            if not name.startswith("_") or name in ("__getitem__", "__enter__")
        ]
    found = set()
    for function in functions:
        annotation = str(getattr(function, "__annotations__", {}).get("return", ""))
        known = vars(sys.modules[getattr(function, "__module__", None) or "polyhead"])
        for word in re.findall(r"\b[A-Z]\w+", annotation):
            kind = known.get(word)
            if inspect.isclass(kind) and kind.__module__.startswith("polyhead"):
                found.add(kind)
    return found
