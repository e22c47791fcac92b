"""The Chinese pages of docs/ say what the English ones say, as far as a test can tell."""

import re

import pytest

from translations import (
    COMMENTS,
    DOCS,
    ENGLISH_ONLY,
    blocks,
    comments,
    figures,
    in_chinese,
    links,
    names,
    pages,
    prose,
    tables,
)

PAGES = [
    pytest.param(english, chinese, id=english.relative_to(DOCS).as_posix())
    for english, chinese in pages()
]


def test_every_page_that_is_written_by_hand_has_its_chinese_one():
    chinese = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.zh.md")}
    assert chinese == {page.values[1].relative_to(DOCS).as_posix() for page in PAGES}
    assert len(chinese) > 20
    assert all((DOCS / name).is_file() for name in ENGLISH_ONLY)


@pytest.mark.parametrize(("english", "chinese"), PAGES)
def test_code_headings_links_tables_figures_and_names_are_the_same(english, chinese):
    ours, theirs = (page.read_text(encoding="utf-8") for page in (english, chinese))
    check_same(ours, theirs)
    assert links(theirs) == links(ours)


def check_same(ours: str, theirs: str) -> None:
    """Everything of two texts that a test can compare, except their links."""
    assert blocks(theirs) == list(map(in_chinese, blocks(ours))), (
        "run: python tools/translations.py"
    )
    levels = [re.findall(r"^(#+) ", prose(text), re.M) for text in (ours, theirs)]
    assert levels[1] == levels[0]
    assert names(theirs) == names(ours)
    for one, other in zip(tables(ours), tables(theirs), strict=True):
        for cells, translated in zip(one, other, strict=True):
            assert list(map(figures, translated)) == list(map(figures, cells)), cells
    fractions = [
        {number for number in figures(prose(text)) if "." in number} for text in (ours, theirs)
    ]
    assert fractions[1] == fractions[0]


def test_comments_in_the_code_of_chinese_pages_are_chinese():
    """tools/comments.toml translates each, and has none that no page uses."""
    used = set()
    readme = DOCS.parent / "README.md"
    for english, chinese in [*pages(), (readme, readme.with_suffix(".zh-CN.md"))]:
        for block in blocks(english.read_text(encoding="utf-8")):
            used |= set(comments(block))
        for block in blocks(chinese.read_text(encoding="utf-8")):
            for comment in comments(block):
                assert re.search("[\u4e00-\u9fff]", comment), (chinese.name, comment)
    assert used == set(COMMENTS)


@pytest.mark.parametrize("word", ["抽样", "本地代码", "做不到的指名", "四条束", "穿过各层的路"])
def test_chinese_pages_use_the_words_of_the_glossary(word):
    readme = DOCS.parent / "README.zh-CN.md"
    for page in [*(chinese for _, chinese in pages()), readme]:
        assert word not in page.read_text(encoding="utf-8"), page.name
