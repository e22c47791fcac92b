"""The Chinese pages of docs/ (``start.zh.md``) beside their English ones (``start.md``).

    python tools/translations.py

copies code and what it prints from the English pages, and README.md, into the Chinese ones, with
comments as ``comments.toml`` translates them. ``tests/test_translations.py`` compares the rest:
headings, links, tables, figures and names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
# Written by commands, or from docstrings, which are in English.
ENGLISH_ONLY = {"capabilities.md"} | {
    page.relative_to(DOCS).as_posix()
    for page in (DOCS / "reference").glob("*.md")
    if page.name not in {"index.md", "index.zh.md"}
}
COMMENTS = tomllib.loads(Path(__file__).with_name("comments.toml").read_text(encoding="utf-8"))
COMMENT = re.compile(r"(?:^|(?<=\s))# (\S.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```\w*\n.*?^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+")


def pages() -> Iterator[tuple[Path, Path]]:
    """(English page, Chinese page), of every page that is written by hand."""
    for english in sorted(DOCS.rglob("*.md")):
        name = english.relative_to(DOCS).as_posix()
        if not name.endswith(".zh.md") and name not in ENGLISH_ONLY:
            yield english, english.with_suffix(".zh.md")


def blocks(text: str) -> list[str]:
    """The fenced blocks of a page."""
    return BLOCK.findall(text)


def comments(block: str) -> list[str]:
    """The comments of a fenced block of code that have words; a block of output has none."""
    found = [] if block.startswith("```text") else COMMENT.findall(block)
    return [each for each in found if re.search(r"[a-z]{2}", each) and not each.startswith("fmt:")]


def in_chinese(block: str) -> str:
    """A fenced block of an English page as the Chinese page has it."""
    for comment in comments(block):
        block = block.replace(f"# {comment}", f"# {COMMENTS.get(comment, comment)}")
    return block


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return BLOCK.sub("", text)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table: rows of texts; the rule below the heading is left out."""
    found = []
    for table in re.findall(r"(?:^\|.*\n?)+", prose(text), re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in table.splitlines()]
        found.append([rows[0], *rows[2:]])
    return found


def figures(text: str) -> list[str]:
    """The numbers in a text but for those of links, sorted."""
    return sorted(NUMBER.findall(re.sub(r"\]\([^)]+\)", "", text)))


def names(text: str) -> set[str]:
    """What a text sets in `code`."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose(text))}


def links(text: str) -> list[str]:
    """The pages and pictures that a text links to, sorted."""
    return sorted(target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", prose(text)))


def main() -> None:
    readme = DOCS.parent / "README.md"
    for english, chinese in [*pages(), (readme, readme.with_suffix(".zh-CN.md"))]:
        text = chinese.read_text(encoding="utf-8")
        source = list(map(in_chinese, blocks(english.read_text(encoding="utf-8"))))
        if len(blocks(text)) != len(source):
            print(f"{chinese.name}: {len(blocks(text))} blocks, {english.name} has {len(source)}")
            continue
        between = BLOCK.split(text)
        whole = "".join(part + block for part, block in zip(between, [*source, ""], strict=True))
        chinese.write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    main()
