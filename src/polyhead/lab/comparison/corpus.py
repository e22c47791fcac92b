"""The text that variants are trained on: your own files, or texts that every installation has.

By default it is the documentation strings of Python's standard library and of numpy, about 3.4 MB
of English about programs. Files, and not lines, are divided into training and validation. Tokens
are a byte-level BPE trained on the training part.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from polyhead.errors import InputError

_END = "<end>"
_SHARE = 0.1
"""Fraction of the bytes for validation."""


@dataclass(frozen=True)
class Text:
    """Texts of two parts.

    Attributes:
        train: To learn from, a text for each file.
    """

    said: str
    train: tuple[str, ...]
    validation: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """SHA-256 of both parts: equal if two comparisons used the same text."""
        whole = "\0\0".join("\0".join(part) for part in (self.train, self.validation))
        return hashlib.sha256(whole.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A text as tokens.

    Attributes:
        train: ``[N]`` int32.
        validation: ``[M]`` int32.
    """

    said: str
    sha256: str
    train: Tensor
    validation: Tensor
    validation_bytes: int
    vocab_size: int


def read(files: Sequence[Path]) -> Text:
    """The text of files; without files, of the installed documentation strings.

    Raises:
        InputError: A file that cannot be read, is not UTF-8 or empty.
    """
    if not files:
        named = list(_documentation())
        said = (
            f"documentation strings of Python {platform.python_version()}'s standard library and "
            f"numpy {version('numpy')}"
        )
    else:
        named = [(str(file), _text_of(file)) for file in files]
        said = named[0][0] if len(named) == 1 else f"{len(named)} files"
    train, validation = _divided(named)
    return Text(said, train, validation)


def corpus(text: Text, vocab_size: int) -> Corpus:
    """The text as tokens of a BPE that is trained on its training part."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.train, trainer)

    def tokens(texts: Sequence[str]) -> Tensor:
        encoded = tokenizer.encode_batch(list(texts))
        ids = [token for each in encoded for token in (*each.ids, tokenizer.token_to_id(_END))]
        return torch.tensor(ids, dtype=torch.int32)

    return Corpus(
        text.said,
        text.sha256,
        tokens(text.train),
        tokens(text.validation),
        sum(len(each.encode()) for each in text.validation),
        tokenizer.get_vocab_size(),
    )


def _text_of(file: Path) -> str:
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise InputError(f"cannot read {str(file)!r}: {(error.strerror or '').lower()}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: byte {error.start}") from error
    if not text.strip():
        raise InputError(f"{file} is empty: give a text")
    return text


def _divided(named: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A tenth of the bytes, in whole files where there are several, for validation."""
    if len(named) == 1:
        lines = named[0][1].splitlines(keepends=True)
        cut = max(1, round(len(lines) * (1 - _SHARE)))
        if cut == len(lines):
            raise InputError(f"{named[0][0]} has too few lines to divide: got {len(lines)}")
        return ("".join(lines[:cut]),), ("".join(lines[cut:]),)
    texts = sorted(
        (text for _, text in named), key=lambda text: hashlib.sha256(text.encode()).digest()
    )
    wanted, taken, count = _SHARE * sum(map(len, texts)), 0, 0
    while taken < wanted and count < len(texts) - 1:
        taken += len(texts[count])
        count += 1
    return tuple(texts[count:]), tuple(texts[:count])


def _documentation() -> Iterator[tuple[str, str]]:
    """The documentation strings of each module of the standard library and of numpy."""
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    for root in (Path(sysconfig.get_path("stdlib")), Path(spec.origin).parent):
        for file in sorted(root.rglob("*.py")):
            inside = file.relative_to(root).as_posix()
            if "site-packages/" in inside or "test" in inside:
                continue
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError, OSError):  # some are broken on purpose
                continue
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
            found = [said for node in nodes if (said := ast.get_docstring(node))]
            if found:
                yield f"{root.name}/{inside}", "\n\n".join(found)
