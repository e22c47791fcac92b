"""docs/glossary.md defines polyhead's own words, those that headings use, and no others."""

import inspect
import re

import polyhead as ph
from translations import DOCS, prose, tables

PAGES = {
    page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md"))
    if not page.name.endswith(".zh.md")
}
TERMS = {
    term.strip(): (meaning.strip(), nearest.strip())
    for term, meaning, nearest in tables(PAGES.pop("glossary.md"))[0][1:]
}
# Words that a heading may use only if they are defined.
OWN = {
    "batch invariance", "decode plan", "family", "fold", "folding", "guard", "head layout",
    "healing", "house", "index", "label", "layout", "look", "lse", "meaning", "piece", "place",
    "position", "probe", "region", "ring", "room", "sinks", "source", "stars", "state", "storage",
    "strip", "tile",
}  # fmt: skip


def uses(term, text):
    """Whether a text has this term, in the singular or the plural."""
    plural = term[:-1] + "ies" if term.endswith("y") else f"{term}(?:s|es)?"
    return re.search(rf"\b(?:{re.escape(term)}|{plural})\b", text, re.IGNORECASE) is not None


def test_terms_are_few_in_order_and_short():
    assert 10 <= len(TERMS) <= 20
    assert list(TERMS) == sorted(TERMS)
    for term, (meaning, nearest) in TERMS.items():
        sentences = re.findall(r"[.?:](?: |$)", meaning)
        assert meaning.endswith((".", "?")), term
        assert 1 <= len(sentences) <= 3, term
        assert nearest, term


def test_every_term_is_used_in_a_page_or_a_public_docstring():
    public = [inspect.getdoc(getattr(ph, name)) or "" for name in ph.__all__]
    texts = [*map(prose, PAGES.values()), *public]
    for term in TERMS:
        assert any(uses(term, text) for text in texts), term


def test_headings_use_no_own_word_that_is_not_defined():
    assert set(TERMS) <= OWN
    headings = [
        (page, line)
        for page, text in PAGES.items()
        for line in re.findall(r"^#+ .*", prose(text), re.MULTILINE)
    ]
    assert len(headings) > 100
    for term in sorted(OWN - set(TERMS)):
        assert [heading for heading in headings if uses(term, heading[1])] == [], term
