"""Puts the lesson into the site that mkdocs builds: ``lesson.html``, one for each language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyhead.viewer.lesson import render

LANGUAGES = {"": "en", "zh": "zh"}
"""Folder of the site → the language that the lesson begins with."""


def on_pre_build(config: Any) -> None:
    """Writes what the pages link to, so that mkdocs finds it as it finds pictures.

    ``lesson.zh.html`` is its Chinese form, as ``start.zh.md`` is a page's.
    """
    for folder, language in LANGUAGES.items():
        place = Path(config["docs_dir"]) / f"lesson{'.' if folder else ''}{folder}.html"
        page = render(language)
        if not place.is_file() or place.read_text(encoding="utf-8") != page:  # mkdocs serve watches
            place.write_text(page, encoding="utf-8")
