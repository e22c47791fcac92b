"""Texts: divided by file, whole, and refused where they are none."""

import pytest

from polyhead.errors import InputError
from polyhead.lab.comparison.corpus import read


def test_a_tenth_of_the_files_is_for_validation_and_none_is_in_both(text_files, tokens):
    text = read(text_files)
    assert len(text.train) == 10
    assert len(text.validation) == 2
    assert {*text.train, *text.validation} == {file.read_text() for file in text_files}
    assert read(text_files[::-1]).sha256 == text.sha256 == tokens.sha256
    assert read(text_files[1:]).sha256 != text.sha256


def test_tokens_end_each_file_and_hold_its_text(tokens):
    end = 0
    assert int((tokens.train == end).sum()) == 10
    assert int(tokens.train[-1]) == end
    assert 257 < tokens.vocab_size <= 300  # of a small text not all are found
    assert int(tokens.train.max()) < tokens.vocab_size


def test_one_file_is_divided_by_lines(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("".join(f"line {n}\n" for n in range(20)))
    text = read([file])
    assert text.validation == ("line 18\nline 19\n",)
    assert text.train[0] + text.validation[0] == file.read_text()
    assert text.said == str(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"one line", "too few lines"),
        (b"a\xffb", "not UTF-8"),
    ],
)
def test_texts_that_are_none_are_refused(tmp_path, content, words):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read([file])
    with pytest.raises(InputError, match="cannot read"):
        read([tmp_path / "absent.txt"])


@pytest.mark.slow
def test_the_text_that_is_there_is_english_about_programs():
    text = read([])
    assert "documentation strings of Python" in text.said
    assert sum(map(len, text.train)) > 2_000_000
    assert any("Return" in said for said in text.validation)
