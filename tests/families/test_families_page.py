"""docs/families.md is what the command writes today."""

from __future__ import annotations

from families_page import PAGE, page


def test_page_of_families_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/families.md is written by: python tools/families_page.py"
    )
