"""Texts from files: pairs and documents, with errors that name the file and the line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from polyhead._utils.checks import check_one_of
from polyhead.errors import InputError
from polyhead.training.corpora.corpus import Pair

Documents = Literal["files", "paragraphs", "lines"]
"""What a document is: a whole file, what stands between empty lines, or a line."""
DOCUMENTS = ("files", "paragraphs", "lines")


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file.

    Raises:
        InputError: It cannot be read, is empty, or a line is not UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {str(path)!r}: {reason}") from error
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{path}, line {line}: not UTF-8: a byte is 0x{content[error.start]:02x}"
        ) from error
    if not any(line.strip() for line in lines):
        raise InputError(f"{path} is empty")
    return lines


def pairs_of_table(path: str | Path) -> list[Pair]:
    """Pairs of a file with two columns, a tab between.

    Raises:
        InputError: As ``read_lines``, or a line that is not a pair.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        texts, where = line.split("\t"), f"{path}, line {number}"
        if len(texts) != 2:
            raise InputError(f"{where}: a pair is two texts with a tab between: got {len(texts)}")
        pairs.append(_pair(texts[0], texts[1], where))
    return pairs


def pairs_of_files(source: str | Path, target: str | Path) -> list[Pair]:
    """Pairs of two files, line by line.

    Raises:
        InputError: As ``read_lines``, files of unequal length, or an empty line.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(
            f"{source} has {len(sources):,} lines and {target} {len(targets):,}: line by line they "
            "must be pairs"
        )
    return [
        _pair(a, b, f"{source} and {target}, line {number}")
        for number, (a, b) in enumerate(zip(sources, targets, strict=True), start=1)
    ]


def _pair(source: str, target: str, where: str) -> Pair:
    for name, text in (("source", source), ("target", target)):
        if not text.strip():
            raise InputError(f"{where}: the {name} is empty")
    return Pair(source.strip(), target.strip(), where)


def documents_of(paths: Iterable[str | Path], each: Documents = "files") -> list[str]:
    """The documents of text files.

    Raises:
        InputError: As ``read_lines``, or no files.
    """
    check_one_of("documents", each, DOCUMENTS)
    found: list[str] = []
    for path in paths:
        lines = read_lines(path)
        if each == "lines":
            found += [line for line in lines if line.strip()]
        elif each == "files":
            found.append("\n".join(lines))
        else:
            found += _paragraphs(lines)
    if not found:
        raise InputError("there are no text files to learn from")
    return found


def _paragraphs(lines: Sequence[str]) -> list[str]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(paragraph) for paragraph in found if paragraph]
