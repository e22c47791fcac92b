"""Writes the notebooks of examples/: pages of docs/ as cells, with what the pages show as outputs.

python tools/notebooks.py
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FINDINGS = ("induction", "previous-token", "sinks", "copying", "indirect-object")
NOTEBOOKS = {
    "small-transformer.ipynb": "docs/tutorials/small-transformer.md",
    "replacing.ipynb": "docs/replacing.md",
} | {
    f"findings/{name}{language}.ipynb": f"docs/findings/{name}{language}.md"
    for name in FINDINGS
    for language in ("", ".zh")
}
CODE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def notebook(name: str) -> str:
    """The page of a notebook as its file (nbformat 4.5), links seen from the notebook's folder."""
    page = NOTEBOOKS[name]
    here, folder = (ROOT / page).parent, (ROOT / "examples" / name).parent
    text = LINK.sub(
        lambda link: f"]({os.path.relpath(here / link[1], folder)})",
        (ROOT / page).read_text(encoding="utf-8"),
    )
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **fields: Any) -> None:
        if source.strip():
            lines = source.strip("\n").splitlines(keepends=True)
            cells.append(
                {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, **fields}
                | {"source": lines}
            )

    end = 0
    for found in CODE.finditer(text):
        add("markdown", text[end : found.start()])
        outputs = []
        if found[2]:
            shown = found[2].splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": shown}]
        add("code", found[1], execution_count=None, outputs=outputs)
        end = found.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    for name in NOTEBOOKS:
        (ROOT / "examples" / name).write_text(notebook(name), encoding="utf-8")
