"""Tokens and heads as people read them."""

from __future__ import annotations

import pytest

from polyhead._utils.texts.labels import head_name, isolated, label, visible
from polyhead.cli.matrices import matrix, width_of


@pytest.mark.parametrize(
    ("piece", "shown", "short"),
    [
        (" cat", "␣cat", "cat"),
        ("  cat", "␣␣cat", "␣␣cat"),
        (" New York ", "␣New␣York␣", "New York␣"),
        (" ", "␣", "␣"),
        ("", "∅", "∅"),
        ("\n\t\r", "⏎⇥␍", "⏎⇥␍"),
        (" 猫₁", "␣猫₁", "猫₁"),
        ("\u3000\xa0", "␣␣", "␣␣"),
        ("\u202e\x00\u2028", "\\u202e\\u0000\\u2028", "\\u202e\\u0000\\u2028"),
        ("\ud83d", "\ufffd", "\ufffd"),
        ("\u0301", "◌\u0301", "◌\u0301"),
        ("می\u200cخواهم", "می\u200cخواهم", "می\u200cخواهم"),
    ],
)
def test_what_cannot_be_seen_gets_a_sign(piece: str, shown: str, short: str) -> None:
    assert (visible(piece), label(piece)) == (shown, short)


def test_words_from_right_to_left_are_isolated_and_others_left_alone() -> None:
    assert isolated("קטה") == "\u2068קטה\u2069"
    assert isolated("القطة") == "\u2068القطة\u2069"
    assert isolated("猫 cat") == "猫 cat"


def test_columns_stay_in_line_under_wide_and_right_to_left_names() -> None:
    lines = matrix([[0.5, 0.25]] * 3, rows=["cat", "睡觉", "קטה"], columns=["猫", "القطة"])
    assert len({line.cell_len for line in lines[1:]}) == 1
    assert width_of(lines) == lines[1].cell_len
    assert "睡觉" in lines[2].plain


def test_a_head_has_one_name() -> None:
    assert head_name(18, 6) == "18.6"
    assert head_name("C0", 3) == "C0.3"
