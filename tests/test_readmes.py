"""README.zh-CN.md says what README.md says: the same code, sections, tables, figures and pages."""

from __future__ import annotations

import re
from pathlib import Path

from test_translations import check_same
from translations import figures, links, tables

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
)


def test_code_sections_tables_figures_and_names_are_the_same() -> None:
    check_same(ENGLISH, CHINESE)
    assert len(re.findall(r"```python\n", ENGLISH)) >= 1
    assert len(tables(ENGLISH)) >= 3


def test_linked_pages_are_the_same_and_there() -> None:
    translated = set()
    for page in set(links(ENGLISH)) - {"README.zh-CN.md"}:
        assert (ROOT / page).is_file(), page
        chinese = re.sub(r"\.md$", ".zh.md", page)
        translated.add(chinese if (ROOT / chinese).is_file() else page)
    assert len(translated) > 15
    assert set(links(CHINESE)) - {"README.md"} == translated


def test_a_reader_gets_through_it_in_minutes() -> None:
    assert len(ENGLISH.split()) <= 900


def test_figures_of_speed_stand_in_the_page_of_performance() -> None:
    measured = figures((ROOT / "docs/performance.md").read_text(encoding="utf-8"))
    speeds = next(table for table in tables(ENGLISH) if "float32" in table[0][-2])
    assert len(speeds) > 8
    for row in speeds[1:]:
        assert set(figures(row[-2] + row[-1])) <= set(measured), row
