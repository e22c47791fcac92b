"""What tokens say where they split characters."""

from __future__ import annotations

import pytest

from polyhead.checkpoints.tokenizers.pieces import pieces_of


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([b"The", b" cat"], ["The", " cat"]),
        ([b"\xe7\x8c\xab"], ["猫"]),
        ([b" \xe7\x8c", b"\xab"], [" 猫₁", "猫₂"]),
        ([b"\xe7", b"\x8c", b"\xab\xe5", b"\x9c\xa8."], ["猫₁", "猫₂", "猫₃在₁", "在₂."]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["😀₁", "😀₂", "😀₃", "😀₄"]),
        ([b"a\xe7"], ["a\\xe7"]),  # the text ends within a character
        ([b"\xe7\x8c", b"a", b"\xab"], ["\\xe7\\x8c", "a", "\\xab"]),
        ([b"\xff", b"\xc3", b"\xa9"], ["\\xff", "é₁", "é₂"]),
        ([b"", b"x", b""], ["", "x", ""]),
        ([], []),
    ],
)
def test_a_token_names_the_characters_that_it_is_part_of(
    tokens: list[bytes], said: list[str]
) -> None:
    assert pieces_of(tokens) == said
