"""Token ids equal transformers' on the same files, and decoding loses nothing."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.checkpoints import Checkpoint, Tokenizer
from polyhead.errors import CheckpointError, InputError

PROSE = (
    "The animal didn't cross the street because it was too tired. They've said: “No!” — he'll go."
)
CODE = (
    "def f(x):\n\treturn [i**2 for i in x]  # squares\n\n\nif __name__ == '__main__':\n    f(3)\n"
)
DIGITS = "In 1984 there were 123,456,789 of them (3.14159e-10), 50% off, ½ ² Ⅷ ٣ 2nd"
SPACES = "a  b   c\t\td \n\n\n e\r\n f\u00a0g\u3000h \n"
CJK = "人工智能の注意機構は素晴らしいです。한국어도 있습니다 مرحبا שלום नमस्ते"
EMOJI = "👍🏽 👨‍👩‍👧‍👦 🇩🇪 😀😀 café cafe\u0301 ﬁ Ａ"
SPECIAL = "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|not_special|><empty_output>x"
TEXTS = (PROSE, CODE, DIGITS, SPACES, CJK, EMOJI, SPECIAL, "", " ", "\n", "'s", "  x", "x  ")

CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Why is 2 + 2 = 4?\n\nThink 🤔"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "<b>&'\" really?", "name": None},
]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def bpe(smollm2: Checkpoint) -> Tokenizer:
    return smollm2.tokenizer


@pytest.fixture(scope="module")
def wordpiece(minilm_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(minilm_directory)


@pytest.fixture(scope="module")
def wordpiece_oracle(minilm_directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_directory)


@pytest.fixture(scope="module")
def bpe_oracle(smollm2_oracle_tokenizer: Any) -> Any:
    """transformers' tokenizer of the GGUF file, with the split that the file names.

    transformers 5.23 does not know the pre-tokenizer ``smollm`` and splits as GPT-2 does. The
    vocabulary was trained with every digit cut out first, which llama.cpp and the original
    tokenizer.json do too; it shows where several spaces stand before a digit.
    """
    from tokenizers import pre_tokenizers

    altered = copy.deepcopy(smollm2_oracle_tokenizer)
    backend = altered.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return altered


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_ids_equal_transformers(text: str, bpe: Tokenizer, bpe_oracle: Any) -> None:
    assert bpe.encode(text) == bpe_oracle(text).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_wordpiece_ids_equal_transformers(
    text: str, wordpiece: Tokenizer, wordpiece_oracle: Any
) -> None:
    assert wordpiece.encode(text) == wordpiece_oracle(text).input_ids
    bare = wordpiece_oracle(text, add_special_tokens=False).input_ids
    assert wordpiece.encode(text, add_special=False) == bare


def test_unaltered_transformers_agrees_where_no_space_stands_before_a_digit(
    bpe: Tokenizer, hamlet: str, smollm2_oracle_tokenizer: Any
) -> None:
    for text in (hamlet, PROSE, CODE, "1984, 123,456,789 2nd", SPACES, CJK, EMOJI, SPECIAL):
        assert bpe.encode(text) == smollm2_oracle_tokenizer(text).input_ids


def test_digits_are_cut_out_before_spaces_are_joined(bpe: Tokenizer) -> None:
    assert bpe.pieces(bpe.encode("x   12 ½")) == ["x", "   ", "1", "2", " ", "½"]


@pytest.fixture(scope="module")
def bytes_without_token(bpe: Tokenizer) -> set[int]:
    """This vocabulary lacks a token for 10 bytes of UTF-8, which it therefore cannot spell."""
    spelled = {bpe.token_bytes(i)[0] for i in range(bpe.vocab_size) if len(bpe.token_bytes(i)) == 1}
    missing = set(range(256)) - spelled
    assert missing < {4, 6, 19, 20, 22, 29, *range(0xC0, 0xC2), *range(0xF1, 0x100)}
    return missing


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_ids_of_transformers_and_round_trips(
    text: str, bpe: Tokenizer, bpe_oracle: Any, bytes_without_token: set[int]
) -> None:
    assert bpe.encode(text) == bpe_oracle(text).input_ids
    text = "".join(c for c in text if not bytes_without_token & set(c.encode()))
    ids = bpe.encode(text)
    assert bpe.decode(ids, skip_special=False) == text
    assert b"".join(bpe.token_bytes(token_id) for token_id in ids).decode() == text
    stream = bpe.stream(skip_special=False)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_ids_of_transformers_in_wordpiece(
    text: str, wordpiece: Tokenizer, wordpiece_oracle: Any
) -> None:
    assert wordpiece.encode(text) == wordpiece_oracle(text).input_ids


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=30), skip=st.booleans())
def test_stream_of_any_ids_is_their_text_and_never_half_a_character(
    ids: list[int], skip: bool, bpe: Tokenizer
) -> None:
    whole = bpe.decode(ids, skip_special=skip)
    stream = bpe.stream(skip_special=skip)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) + stream.flush() == whole


def test_stream_holds_an_emoji_back_until_it_is_whole(bpe: Tokenizer) -> None:
    ids = bpe.encode("a 🤗!")
    stream = bpe.stream()
    parts = [stream.push(token_id) for token_id in ids]
    assert len(ids) > 4
    assert [part for part in parts if part] == ["a", " ", "🤗", "!"]
    stream = bpe.stream()
    cut = [stream.push(token_id) for token_id in ids[:-2]]
    assert "".join(cut) == "a "
    assert stream.flush() == "�"


def test_stream_of_wordpieces_is_their_text(wordpiece: Tokenizer) -> None:
    ids = wordpiece.encode("unbelievably transformative 人 words")
    stream = wordpiece.stream()
    parts = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(parts) == wordpiece.decode(ids)
    assert max(len(part) for part in parts) < 15


def test_pieces_are_readable(bpe: Tokenizer, wordpiece: Tokenizer) -> None:
    ids = bpe.encode("Hi there,\n 🤗<|im_end|>")
    assert bpe.pieces(ids)[:4] == ["Hi", " there", ",", "\n"]
    assert bpe.pieces(ids)[4:] == [" 🤗₁", "🤗₂", "🤗₃", "<|im_end|>"]
    assert wordpiece.pieces(wordpiece.encode("tokenization"))[1:3] == ["token", "##ization"]
    assert bpe.pieces([10**6]) == ["[1000000]"]


def test_special_ids(bpe: Tokenizer, wordpiece: Tokenizer) -> None:
    assert (bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id) == (1, 2, 2)
    assert bpe.stop_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert bpe.vocab_size == 49_152
    assert (wordpiece.eos_token_id, wordpiece.pad_token_id) == (None, 0)
    assert wordpiece.encode("hi")[0] == wordpiece.backend.token_to_id("[CLS]")


def test_nothing_is_cut_or_padded(wordpiece: Tokenizer) -> None:
    assert len(wordpiece.encode("word " * 1000)) == 1002
    assert len(wordpiece.encode("word")) == 3


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_equals_transformers(prompt: bool, bpe: Tokenizer, bpe_oracle: Any) -> None:
    for chat in (CHAT, CHAT[1:2]):
        text = bpe.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == bpe_oracle.apply_chat_template(
            chat, add_generation_prompt=prompt, tokenize=False
        )
        ids = bpe_oracle.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
        assert bpe.encode(text, add_special=False) == ids


def test_saved_tokenizer_is_the_same_for_polyhead_and_transformers(
    bpe: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    bpe.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == bpe.encode(text) == theirs(text).input_ids
    assert again.stop_ids == bpe.stop_ids
    assert again.special_tokens == bpe.special_tokens
    assert again.apply_chat_template(CHAT) == bpe.apply_chat_template(CHAT)
    assert theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    ) == bpe.apply_chat_template(CHAT)


def test_other_threads_run_while_a_long_text_is_read(bpe: Tokenizer) -> None:
    text, turns, ended = "A text. " * 40_000, [0], threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    before = turns[0]
    ids = bpe.encode(text, release_gil=True)
    after = turns[0]
    ended.set()
    other.join()
    assert after > before + 3
    assert ids == bpe.encode(text)
    for text in TEXTS:
        assert bpe.encode(text, False, release_gil=True) == bpe.encode(text, False)


def test_half_a_surrogate_pair_is_refused(bpe: Tokenizer) -> None:
    with pytest.raises(InputError, match="character 2 is half a surrogate pair"):
        bpe.encode("ok\ud83d")
    with pytest.raises(TypeError, match="text must be a str: got bytes"):
        bpe.encode(b"bytes")  # type: ignore[arg-type]


def test_chat_needs_a_template_and_messages(bpe: Tokenizer, wordpiece: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        wordpiece.apply_chat_template(CHAT)
    with pytest.raises(InputError, match="at least one message"):
        bpe.apply_chat_template([])
    with pytest.raises(InputError, match="'role' and 'content'"):
        bpe.apply_chat_template([{"content": "no role"}])
