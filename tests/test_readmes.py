"""README.zh-CN.md is in step with README.md: the same code, commands, sections and pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
)


def test_snippets_are_the_same_but_for_their_comments() -> None:
    codes = [
        [ast.dump(ast.parse(code)) for code in re.findall(r"```python\n(.*?)```", text, re.S)]
        for text in (ENGLISH, CHINESE)
    ]
    assert len(codes[0]) >= 3
    assert codes[0] == codes[1]


def test_commands_and_masks_are_the_same() -> None:
    rows = [re.findall(r"^\| (`[^|]*?`)", text, re.M) for text in (ENGLISH, CHINESE)]
    names = [
        [re.findall(r"`([^`]+)`", row.replace("\\|", "/"))[0] for row in each] for each in rows
    ]
    assert len(names[0]) > 15
    assert names[0] == names[1]


def test_sections_and_linked_pages_are_the_same() -> None:
    sections = [len(re.findall(r"^## ", text, re.M)) for text in (ENGLISH, CHINESE)]
    assert sections[0] == sections[1]
    pages = [set(re.findall(r"\]\((docs/[\w./-]+)", text)) for text in (ENGLISH, CHINESE)]
    translated = {page.replace(".md", ".zh.md") for page in pages[0]}
    assert len(translated) > 15
    assert pages[1] == {
        page if (ROOT / page).is_file() else page.replace(".zh.md", ".md") for page in translated
    }


def test_figures_are_the_same() -> None:
    figures = [
        sorted(re.findall(r"^\|.*\| [\d,.]+ [^|]*\| [\d,.]+ [^|]*\| ([\d.]+) \|$", text, re.M))
        for text in (ENGLISH, CHINESE)
    ]
    assert len(figures[0]) >= 4
    assert figures[0] == figures[1]
