"""Tokenizers of CTranslate2 directories: vocabularies with a SentencePiece model beside them.

A vocabulary lists tokens by their ids. How a text is split into tokens stands in another file,
copied beside it when the model is converted: tokenizer.json, or the family's SentencePiece models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyhead.checkpoints.formats.hugging_face import read_tokenizers
from polyhead.checkpoints.json_file import parse_json, read_text
from polyhead.checkpoints.tokenizers.sentencepiece_tokenizer import (
    Pieces,
    SentencePieceTokenizer,
    read_model,
)
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.errors import CheckpointError, shortened

_MODELS = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model")
_CONTROL = re.compile(
    r"<(?!0x)[^<>\s]+>|>>[^<>]+<<|__[A-Za-z_]{2,8}__|[a-z]{2,3}_[A-Z][A-Za-z]{1,3}"
)
_IN_FRONT = re.compile(">>.*?<<", re.DOTALL)
# transformers' names of tokenizers, by how language tokens are spelled.
_CLASSES = (
    ("Nllb", re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")),
    ("M2M100", re.compile(r"__[A-Za-z_]{2,8}__")),
    ("MBart50", re.compile(r"[a-z]{2}_[A-Z]{2}")),
)


def read_vocabulary(directory: Path, side: str, size: int) -> list[str]:
    """The tokens of one side by their ids; empty if the directory has no vocabulary for it.

    Args:
        directory: directory of the model.
        side: ``"source"`` or ``"target"``.
        size: rows of the model's table.

    Raises:
        CheckpointError: a file is corrupt, or has another number of tokens than the model.
    """
    for name in ("shared_vocabulary", f"{side}_vocabulary", "vocabulary"):
        path = directory / f"{name}.json"
        if path.is_file():
            try:
                tokens = parse_json(read_text(path))
            except ValueError as error:
                raise CheckpointError(f"{path} is not valid JSON: {error}") from error
            if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
                raise CheckpointError(f"{path} must hold a JSON list of texts")
        elif (path := path.with_suffix(".txt")).is_file():
            tokens = read_text(path).removesuffix("\n").split("\n")
        else:
            continue
        if len(tokens) != size:
            raise CheckpointError(
                f"{path} has {len(tokens):,} tokens, the model's vocabulary {size:,}"
            )
        return list(tokens)
    return []


def tokenizers_of(
    directory: Path,
    source: Sequence[str],
    target: Sequence[str],
    special: Mapping[str, str],
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Tokenizers of source and target texts; None if no file says how to split texts.

    Args:
        directory: directory of the model.
        source: tokens of the texts that are read.
        target: tokens of those that are written.
        special: ``"eos_token"`` and others to tokens, as config.json names them.

    Raises:
        CheckpointError: a file is corrupt, or the vocabulary lacks the end or the unknown token.
    """
    found = read_tokenizers(directory)
    if found[0] is not None or not source or not target:
        return found
    apart = [directory / f"{side}.spm" for side in ("source", "target")]
    if all(path.is_file() for path in apart):
        read, written = (
            _made(path, tokens, special)
            for path, tokens in zip(apart, (source, target), strict=True)
        )
        files = read.files | written.files
        if source == target:  # as in transformers, with the token that begins the text
            ids = {token: number for number, token in enumerate([*source, "<pad>"])}
            files["vocab.json"] = json.dumps(ids, ensure_ascii=False).encode()
        read.files = written.files = files
        return read, written
    for name in _MODELS:
        if (directory / name).is_file():
            made = _made(directory / name, source, special)
            return made, made
    return None, None


def _made(path: Path, tokens: Sequence[str], special: Mapping[str, str]) -> SentencePieceTokenizer:
    ids = {token: number for number, token in enumerate(tokens)}
    for name in ("eos_token", "unk_token"):
        if special.get(name) not in ids:
            raise CheckpointError(
                f"{path.parent}: the vocabulary lacks the {name} of config.json: "
                f"{shortened(special.get(name))}"
            )
    named = {name: token for name, token in special.items() if token in ids}
    control = {token for token in tokens if _CONTROL.fullmatch(token)}
    pieces = Pieces(
        read_model(path),
        ids,
        {token: ids[token] for token in {*named.values(), *control}},
        named["unk_token"],
        named["eos_token"],
        _IN_FRONT if any(_IN_FRONT.fullmatch(token) for token in control) else None,
    )
    family = next(
        (name for name, code in _CLASSES if any(code.fullmatch(token) for token in control)),
        "Marian",
    )
    declared = {"tokenizer_class": f"{family}Tokenizer"}
    return SentencePieceTokenizer(pieces, path.parent, [path.name], declared, named)
