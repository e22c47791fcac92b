"""Tokenizers: tokenizer.json with the small files beside it, and vocabularies of GGUF files."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from polyhead.checkpoints.tokenizers.gguf_splits import SPLITS
from polyhead.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer

TEXTS = ("The list's 12  items:\n\tgone!", "naïve ½ 人工 🤗 <s> a</s>b", "", "x" * 300)
directory = Path()


def prepare() -> None:
    global directory
    directory = Path(tempfile.mkdtemp())
    kinds()


@functools.cache
def kinds() -> list[dict[str, Any]]:
    """tokenizer.json of the usual kinds, as the library writes them."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *letters, "th", "the"])}
    level = Backend(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level.decoder = decoders.ByteLevel()
    level.add_special_tokens(["<s>", "</s>"])
    level.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    parts = ("[UNK]", "[CLS]", "[SEP]", "the", "list", "##s", "'", "s", "gone", "!", "1", "##2")
    words = {part: i for i, part in enumerate(parts)}
    piece = Backend(models.WordPiece(words, unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer()
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.decoder = decoders.WordPiece()
    pieces = {token: i for i, token in enumerate(["<unk>", "<0x0A>", "▁", "a", "b", "▁a", "ab"])}
    sentence = Backend(
        models.BPE(vocab=pieces, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    sentence.normalizer = normalizers.Replace(" ", "▁")
    sentence.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    scored = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -1.5), ("b", -2.5)]
    unigram = Backend(models.Unigram(scored, unk_id=0))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Prepend("▁"), normalizers.Lowercase()]
    )
    unigram.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Metaspace(),
        ]
    )
    unigram.decoder = decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0)])
    unigram.enable_truncation(64)
    unigram.enable_padding(length=4, pad_token="<unk>")
    word = Backend(models.WordLevel(words, unk_token="[UNK]"))
    word.pre_tokenizer = pre_tokenizers.Whitespace()
    word.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return [json.loads(backend.to_str()) for backend in (level, piece, sentence, unigram, word)]


CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "model_max_length": 10**30,
}


def case(random: Random) -> None:
    tokenizer = _from_gguf(random) if random.random() < 0.4 else _from_directory(random)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.pieces(ids)
        tokenizer.spans(text)
        whole = tokenizer.decode(ids, skip_special=False)
        stream = tokenizer.stream(skip_special=False)
        parts = [stream.push(token_id) for token_id in ids]
        assert isinstance(whole + "".join(parts) + stream.flush(), str)
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id in tokenizer.stop_ids


def _from_directory(random: Random) -> Tokenizer:
    changed = random.randrange(4)
    files = {
        "tokenizer.json": random.choice(kinds()),
        "tokenizer_config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [1, 2]},
    }
    for number, (name, values) in enumerate(files.items()):
        damaged = changed in (number, 3)
        content = mutation.json_text(random, values) if damaged else json.dumps(values).encode()
        (directory / name).write_bytes(content)
    with tempfile.TemporaryFile() as screen:
        stderr = os.dup(2)
        os.dup2(screen.fileno(), 2)
        try:
            return Tokenizer.from_directory(directory)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            screen.seek(0)
            # Where a target before this one left a thread, ``no_backtrace`` does nothing.
            if threading.active_count() == 1:
                assert screen.read() == b"", "the screen shows what Rust prints"


def _from_gguf(random: Random) -> Tokenizer:
    letters = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ", "th", "the", "<0x0A>", "▁", "▁a"]
    values: dict[str, Any] = {
        "model": random.choice(("gpt2", "llama", "bert", "t5")),
        "pre": random.choice(list(SPLITS)),
        "tokens": letters,
        "merges": ["t h", "th e"],
        "scores": [-float(i) for i in range(len(letters))],
        "token_type": [3, 3] + [1] * (len(letters) - 2),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "cls_token_id": 0,
        "seperator_token_id": 1,
        "unknown_token_id": 2,
        "add_bos_token": True,
    }
    if random.random() < 0.3:
        values["precompiled_charsmap"] = [*random.randbytes(random.randrange(1, 40))]
    if random.random() < 0.9:
        values = mutation.json_object(random, values)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return tokenizer_from_gguf(metadata, Path("tiny.gguf"))
