"""The lesson as one file: markup, style, scripts, texts in all languages, and the numbers."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from polyhead._utils.atomic_write import write_file
from polyhead.viewer.lesson.numbers import lesson_numbers
from polyhead.viewer.page import asset, policy, script_json, texts_json

SCENES = (
    "qkv",
    "scores",
    "example",
    "heads",
    "masks",
    "positions",
    "cross",
    "cache",
    "flash",
    "training",
    "layers",
    "table",
)
"""In the order of the lesson; each is ``scene_NAME.js``."""


def render(language: str | None = None) -> str:
    """The whole lesson as one HTML string, to be stored as UTF-8.

    Args:
        language: That it begins with, "en" or "zh"; None: the browser's.
    """
    style = asset("page.css") + _own("lesson.css")
    theme = asset("theme.js")
    scripts = [asset("dom.js"), asset("texts.js")]
    scripts += [_own(f"{name}.js") for name in ("math", "widgets", "path", "exercises", "real")]
    scripts += [_own(f"scene_{name}.js") for name in SCENES]
    script = '(() => {\n"use strict";\n' + "\n".join([*scripts, _own("lesson.js")]) + "})();\n"
    parts = {
        "policy": policy(style, theme, script),
        "style": style,
        "theme": theme,
        "texts": texts_json(language, "lesson"),
        "numbers": script_json(lesson_numbers()),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _own("lesson.html"))


def write(path: str | os.PathLike[str], language: str | None = None) -> Path:
    """Writes the lesson to ``path``, whole or not at all.

    Raises:
        OSError: The folder is missing, may not be written or is full.
    """
    write_file(path, render(language))
    return Path(path)


def _own(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")
