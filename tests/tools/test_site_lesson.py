"""The hook of mkdocs that writes the lesson where the first pages link to it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lesson_is_one_click_from_the_first_page_in_both_languages(tmp_path: Path) -> None:
    place = ROOT / "tools" / "site_lesson.py"
    assert f"hooks: [{place.relative_to(ROOT)}]" in (ROOT / "mkdocs.yml").read_text("utf-8")
    spec = importlib.util.spec_from_file_location("site_lesson", place)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook.on_pre_build({"docs_dir": str(tmp_path)})
    for code, ending in (("en", ".html"), ("zh", ".zh.html")):
        written = (tmp_path / f"lesson{ending}").read_text(encoding="utf-8")
        assert f'"chosen":"{code}"' in written
        first = ROOT / "docs" / f"index{ending.replace('html', 'md')}"
        assert "](lesson.html)" in first.read_text(encoding="utf-8")
