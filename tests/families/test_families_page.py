"""docs/families.md and its Chinese page are what the command writes today."""

from __future__ import annotations

from families_page import PAGES, pages


def test_pages_of_families_are_up_to_date() -> None:
    for name, text in pages().items():
        assert PAGES[name].read_text(encoding="utf-8") == text, (
            f"{PAGES[name].name} is written by: python tools/families_page.py"
        )
