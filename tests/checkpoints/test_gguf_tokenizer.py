"""Vocabularies inside GGUF files, of both kinds and every split, equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from polyhead.checkpoints import Tokenizer
from polyhead.checkpoints.tokenizers.gguf_splits import SPLITS
from polyhead.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
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


def test_gemma_4s_vocabulary_equals_the_tokenizer_that_it_comes_from() -> None:
    theirs = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *bytes_], show_progress=False, limit_alphabet=100
    )
    theirs.train_from_iterator([each.replace(" ", "▁") for each in TRAINING], trainer)
    state = json.loads(theirs.to_str()) | {"added_tokens": []}
    theirs = Backend.from_str(json.dumps(state))
    tokens = [theirs.id_to_token(i) for i in range(theirs.get_vocab_size())]
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    metadata = _with_specials(tokens, model="gemma4", merges=merges, add_space_prefix=False)
    ours = tokenizer_from_gguf(metadata, Path("x.gguf"))
    for text in ("naïve 人工 a  b\n\n c", " leading and trailing ", ""):
        ids = ours.encode(text, add_special=False)
        assert ids == _ids(theirs, text)
        assert ours.decode(ids) == text
    with pytest.raises(ConfigError, match="add_space_prefix is True"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": True}, Path("x.gguf"))


def test_every_split_loses_nothing(byte_level: dict[str, Any]) -> None:
    for pre in {split: name for name, split in SPLITS.items()}.values():
        tokenizer = _cached(byte_level | {"tokenizer.ggml.pre": pre})
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special=False)
            assert tokenizer.decode(ids, skip_special=False) == text, pre


def _pieces(pre: Any, text: str) -> list[str]:
    return [text[slice(*span)] for _, span in pre.pre_tokenize_str(text)]


def test_splits_equal_transformers() -> None:
    shared = SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o", "llama4"} <= shared
    for name in shared:
        theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
        for text in (*TEXTS, *TRAINING[:3]):
            assert _pieces(SPLITS[name].pre_tokenizer(), text) == _pieces(theirs, text), name


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
        # As llama.cpp's patterns of these names cut it.
        ("falcon", "a<=12345.", ["a", "<=", "123", "45", "."]),
        ("exaone", "a 12", ["a", " ", "1", "2"]),
        ("bloom", "Ah, so (x). y", ["Ah", ",", " so", " (", "x", ").", " y"]),
        ("viking", "a 12", ["a", " ", "1", "2"]),
        ("deepseek-coder", "a 12 人b.\n\n", ["a", " ", "1", "2", " ", "人", "b", ".", "\n", "\n"]),
        ("deepseek-v3", "fooBar 1234人工.\n x", ["fooBar", " ", "123", "4", "人工", ".\n", " x"]),
        ("deepseek-v3", "a =.b.c", ["a", " =.", "b", ".c"]),
        ("seed-coder", "x.\n\n 12", ["x", ".", "\n\n", " ", "1", "2"]),
        ("bailingmoe", "I'd x.\n\n\n 12", ["I", "'d", " x", ".\n\n\n", " ", "1", "2"]),
        ("bailingmoe2", "x\n\n y", ["x", "\n\n", " y"]),
        ("glm4", "a 12345", ["a", " ", "123", "45"]),
        ("tekken", "HELLOWorld a/b/ 12", ["HELLOWorld", " a", "/b", "/", " ", "1", "2"]),
        ("gpt-4o", "HELLOWorld's 1234", ["HELLOWorld's", " ", "123", "4"]),
    ],
)
def test_splits_are_the_ones_that_the_names_mean(pre: str, text: str, pieces: list[str]) -> None:
    assert _pieces(SPLITS[pre].pre_tokenizer(), text) == pieces


def test_qwen2_joins_accents_first(byte_level: dict[str, Any]) -> None:
    tokenizer = _cached(byte_level | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def _converted(directory: Path) -> tuple[dict[str, Any], Backend]:
    """A WordPiece vocabulary as llama.cpp's converter writes it."""
    theirs = Backend.from_file(str(directory / "tokenizer.json"))
    control = {i for i, token in theirs.get_added_tokens_decoder().items() if token.special}
    tokens, kinds = [], []
    for i in range(theirs.get_vocab_size()):
        token = theirs.id_to_token(i)
        kinds.append(3 if i in control else 1)
        if i not in control:
            token = token[2:] if token.startswith("##") else "▁" + token
        tokens.append(token)
    metadata = {"model": "bert", "pre": "jina-v2-en", "tokens": tokens, "token_type": kinds}
    metadata |= {"cls_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, theirs


def test_word_pieces_equal_the_vocabulary_that_they_come_from(minilm_directory: Path) -> None:
    metadata, theirs = _converted(minilm_directory)
    theirs.no_truncation()
    theirs.no_padding()
    ours = tokenizer_from_gguf(metadata, Path("x.gguf"))
    for text in (*TEXTS, *TRAINING[:5], "a" * 101, "[MASK] Élan vital"):
        found = theirs.encode(text)
        assert ours.encode(text) == found.ids
        assert ours.decode(found.ids) == theirs.decode(found.ids)
    pair = ours.backend.encode("who?", "me")
    assert (pair.ids, pair.type_ids) == (
        theirs.encode("who?", "me").ids,
        theirs.encode("who?", "me").type_ids,
    )
    assert ours.special_tokens["cls_token"] == "[CLS]"


def test_a_vocabulary_with_capitals_keeps_them() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁Paris", "▁é", "t", "▁paris"]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * 4,
    }
    cased = tokenizer_from_gguf(metadata, Path("x.gguf"))
    assert cased.encode("Paris ét") == [2, 4, 5, 6, 3]
    folded = tokenizer_from_gguf(
        metadata | {"tokenizer.ggml.normalizer.lowercase": True}, Path("x.gguf")
    )
    assert folded.encode("Paris x") == [2, 7, 1, 3]


def test_unigrams_equal_transformers() -> None:
    learner = Backend(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, show_progress=False, unk_token="<unk>")
    learner.train_from_iterator(TRAINING, trainer)
    learnt = [each for each in json.loads(learner.to_str())["model"]["vocab"] if each[0] != "<unk>"]
    pieces = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], *learnt]
    unused = [[f"[PAD{len(pieces) + i}]", -10000.0] for i in range(128)]
    values = {
        "model": "t5",
        "tokens": [token for token, _ in pieces + unused],
        "scores": [score for _, score in pieces + unused],
        "token_type": [3, 3, 2] + [1] * len(learnt) + [5] * len(unused),
        "eos_token_id": 1,
        "unknown_token_id": 2,
        "remove_extra_whitespaces": True,
        "add_space_prefix": True,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    theirs = convert_gguf_tokenizer("t5", values | {"tokenizer_type": "t5"})[0]
    ours = tokenizer_from_gguf(metadata | {"general.architecture": "t5"}, Path("x.gguf"))
    for text in (*TEXTS, *TRAINING[:5], "a <extra_id_0> b<extra_id_99>"):
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode("a list of items")) == "a list of items"
    plain = tokenizer_from_gguf(metadata, Path("x.gguf"))
    assert plain.backend.token_to_id("<extra_id_0>") is None
    bad = metadata | {"tokenizer.ggml.precompiled_charsmap": [255] * 9}
    with pytest.raises(CheckpointError, match="the vocabulary is corrupt"):
        tokenizer_from_gguf(bad, Path("x.gguf"))


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
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is 'rwkv'.*'gpt2'.*'t5'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "rwkv"}, Path("x.gguf"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is 'kimi-k2'.*smollm"):
        tokenizer_from_gguf(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2"}, Path("x.gguf")
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
