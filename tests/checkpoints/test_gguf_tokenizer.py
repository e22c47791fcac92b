"""Vocabularies inside GGUF files, of both kinds and every split, equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from polyhead.checkpoints import Tokenizer
from polyhead.checkpoints.gguf_tokenizer import SPLITS, tokenizer_from_gguf
from polyhead.errors import CheckpointError, ConfigError

TEXTS = (
    "The list's 1234 items: they've   gone!\n\n\tDON'T  re-read\r\n  x",
    "naïve ½ 人工 🤗 <|end|> a<|end|>b",
    "",
    " leading and trailing ",
)
TRAINING = list(topics.values())[:30]


def _trained(pre: Any, **options: Any) -> Backend:
    backend = Backend(models.BPE(**options))
    backend.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet() if not options else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, limit_alphabet=300
    )
    backend.train_from_iterator(TRAINING, trainer)
    return backend


def _with_specials(tokens: list[str], **metadata: Any) -> dict[str, Any]:
    """Metadata of a vocabulary, three control tokens and one that the user defined after it."""
    control, own = ["<s>", "</s>", "<|end|>"], ["<own>"]
    return {
        "tokenizer.ggml.tokens": tokens + control + own,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * 3 + [4],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eot_token_id": len(tokens) + 2,
        **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()},
    }


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    backend = _trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return _with_specials(tokens, model="gpt2", merges=merges)


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    backend = _trained(pre_tokenizers.Metaspace(), unk_token="<unk>", byte_fallback=True)
    learnt = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    scores = [0.0] * 257 + [-float(i) for i in range(len(learnt))] + [0.0] * 4
    return _with_specials(tokens, model="llama", scores=scores, unknown_token_id=0)


def _theirs(metadata: dict[str, Any]) -> Backend:
    """transformers' tokenizer of the same metadata, without the bos that it adds elsewhere."""
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    keys = {
        names.get(key, key): value
        for key, value in ((k.removeprefix("tokenizer.ggml."), v) for k, v in metadata.items())
    }
    return convert_gguf_tokenizer("llama", keys)[0]


def _ids(backend: Backend, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(TEXTS))
def test_byte_level_vocabularies_equal_transformers(
    pre: str, text: str, byte_level: dict[str, Any]
) -> None:
    metadata = byte_level | {"tokenizer.ggml.pre": pre}
    ours = _cached(metadata)
    assert ours.encode(text, add_special=False) == _ids(_cached_theirs(metadata), text)
    assert ours.decode(ours.encode(text), skip_special=False).removeprefix("<s>") == text


_made: dict[str, Any] = {}


def _cached(metadata: dict[str, Any]) -> Tokenizer:
    key = f"ours {metadata['tokenizer.ggml.model']} {metadata.get('tokenizer.ggml.pre')}"
    if key not in _made:
        _made[key] = tokenizer_from_gguf(metadata, Path("x.gguf"))
    return _made[key]


def _cached_theirs(metadata: dict[str, Any]) -> Backend:
    key = f"theirs {metadata['tokenizer.ggml.model']} {metadata.get('tokenizer.ggml.pre')}"
    if key not in _made:
        _made[key] = _theirs(metadata)
    return _made[key]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(TEXTS))
def test_sentencepiece_vocabularies_equal_transformers(
    text: str, sentencepiece: dict[str, Any]
) -> None:
    ours, theirs = _cached(sentencepiece), _cached_theirs(sentencepiece)
    ids = ours.encode(text, add_special=False)
    assert ids == _ids(theirs, text)
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_loses_nothing(pre: str, byte_level: dict[str, Any]) -> None:
    tokenizer = _cached(byte_level | {"tokenizer.ggml.pre": pre})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False).endswith(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 12345", ["a", " 12345"]),
        ("smollm", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "a 12345", ["a", " ", "123", "45"]),
        ("qwen2", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("gpt-2", "x.\n\n", ["x", ".", "\n\n"]),
        ("qwen2", "x.\n\n", ["x", ".\n\n"]),
        ("gpt-2", "I'M", ["I", "'", "M"]),
        ("llama-bpe", "I'M", ["I", "'M"]),
    ],
)
def test_splits_are_the_ones_that_the_names_mean(pre: str, text: str, pieces: list[str]) -> None:
    from polyhead.checkpoints.gguf_tokenizer import _pre_tokenizer

    found = _pre_tokenizer(SPLITS[pre]).pre_tokenize_str(text)
    assert [text[slice(*span)] for _, span in found] == pieces


def test_qwen2_joins_accents_first(byte_level: dict[str, Any]) -> None:
    tokenizer = _cached(byte_level | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def test_flags_put_special_tokens_around(byte_level: dict[str, Any]) -> None:
    def around(pre: str, **flags: bool) -> list[str]:
        given = {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
        metadata = byte_level | {"tokenizer.ggml.pre": pre} | given
        tokenizer = tokenizer_from_gguf(metadata, Path("x.gguf"))
        return tokenizer.pieces(tokenizer.encode(""))

    assert around("gpt-2") == []
    assert around("llama-bpe") == ["<s>"]
    assert around("llama-bpe", add_bos_token=False) == []
    assert around("gpt-2", add_bos_token=True, add_eos_token=True) == ["<s>", "</s>"]


def test_control_tokens_are_special_and_own_tokens_are_text(byte_level: dict[str, Any]) -> None:
    tokenizer = _cached(byte_level | {"tokenizer.ggml.pre": "gpt-2"})
    ids = tokenizer.encode("a<|end|><own>b")
    assert tokenizer.pieces(ids) == ["a", "<|end|>", "<own>", "b"]
    assert tokenizer.decode(ids) == "a<own>b"
    assert tokenizer.stop_ids == {tokenizer.eos_token_id, ids[1]}


def test_unknown_vocabularies_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is 't5'.*'gpt2'.*'llama'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "t5"}, Path("x.gguf"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is 'gpt-4o'.*smollm"):
        tokenizer_from_gguf(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o"}, Path("x.gguf")
        )
    with pytest.raises(CheckpointError, match="the vocabulary is corrupt"):
        tokenizer_from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "smollm",
                "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.merges": ["a c"],
            },
            Path("x.gguf"),
        )
