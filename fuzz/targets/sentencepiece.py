"""Directories with SentencePiece models in place of tokenizer.json, with their vocabularies."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from polyhead.checkpoints.tokenizers.sentencepiece_tokenizer import from_sentencepiece
from polyhead.generation.pipelines.languages import Languages

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "bark", "at", "night"]
TEXTS = ("the cat </s> sat", "naïve ½ 人工 🤗 <unk>", "", ">>fra<< a mat", "x" * 300)
KINDS = {
    "marian": ("source.spm", "target.spm"),
    "m2m_100": ("sentencepiece.bpe.model",),
    "T5": ("spiece.model",),
    "Pegasus": ("spiece.model",),
    "MBart": ("sentencepiece.bpe.model",),
}
directory = Path()
model = b""


def prepare() -> None:
    global directory, model
    import sentencepiece

    directory = Path(tempfile.mkdtemp())
    drawn, made = Random(0), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(drawn.choices(WORDS, k=6)) for _ in range(100)),
        model_writer=made, vocab_size=30, minloglevel=2,
    )  # fmt: skip
    model = made.getvalue()


def case(random: Random) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    kind = random.choice(list(KINDS))
    changed = random.randrange(5)
    for name in KINDS[kind]:
        content = mutation.data(random, model) if changed in (0, 3) else model
        (directory / name).write_bytes(content)
    if kind in ("marian", "m2m_100"):
        tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁cat", "▁", "a", "t", ">>fra<<"]
        values = {token: index for index, token in enumerate(tokens)}
        text = mutation.json_text(random, values) if changed in (1, 3) else json.dumps(values)
        (directory / "vocab.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    config: dict[str, Any] = {
        "tokenizer_class": f"{kind}Tokenizer",
        "extra_ids": 3,
        "offset": 9,
        "src_lang": "en",
    }
    if random.random() < 0.3:
        config["additional_special_tokens"] = ["en_XX", "fr_XX"]
    said = mutation.json_text(random, config) if changed in (2, 3) else json.dumps(config).encode()
    (directory / "tokenizer_config.json").write_bytes(said)
    found = from_sentencepiece(directory)
    if found is None:
        return
    for tokenizer in found:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert all(0 <= index < tokenizer.vocab_size for index in ids)
            assert len(tokenizer.spans(text)) == len(ids)
            tokenizer.pieces(ids)
            assert isinstance(tokenizer.decode(ids), str)
        Languages.of(tokenizer)
