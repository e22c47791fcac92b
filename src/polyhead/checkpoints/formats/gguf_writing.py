"""A GGUF file with its weights in blocks, of another GGUF file or of a Hugging Face directory.

Settings, tokenizer and small tensors stay as they are. The ``gguf`` package writes the file, one
tensor after the other.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhead._utils.atomic_write import replacing
from polyhead.checkpoints.formats.gguf_export import export
from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.checkpoints.formats.parts import Progress, no_progress
from polyhead.errors import CheckpointError, shortened
from polyhead.quantization import BlockType, block_type, pack, packable

# Left unquantised: not read by matrix products, or too small to gain (as in llama.cpp).
_KEPT = ("norm", "ffn_gate_inp", "position_embd", "token_types", "rope_")
# Where rows are not whole blocks of 256, the type of 32 with as many bits or one more.
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_SETTLED = ("general.architecture", "general.file_type", "general.quantization_version")


def quantize_gguf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: BlockType,
    progress: Progress = no_progress,
) -> dict[str, int]:
    """Writes a GGUF file whose matrices are in blocks, whole or not at all.

    The output matrix (with a tied head the table of tokens) is Q6_K where ``kind`` is a K type of
    fewer bits. Where a row's length is no multiple of 256, blocks of 32 numbers are used, of the
    type next in bits (Q5_0 for Q4_K); where it is no multiple of 32, the matrix stays as it is.

    Args:
        source: A GGUF file, or a Hugging Face directory. Weights of a GGUF file that are quantized
            already are unpacked and packed anew, which loses more than packing the original ones.
        target: The file to write.
        kind: One of ``packable()``.
        progress: Called after every tensor.

    Warns, before a tensor is packed, where the file will be no smaller than the source or weights
    are quantized already: with the exact size of the file.

    Returns:
        How many tensors the file has of each type.

    Raises:
        ValueError: A type that is only read, or the source as target.
        CheckpointError: The source is corrupt, or holds weights that are not finite.
        ConfigError: A directory that no GGUF architecture can say, by name.
        OSError: The target cannot be written.
    """
    if kind.name not in packable():
        raise ValueError(f"type must be one of {', '.join(packable())}: got {kind.name}")
    path, target = Path(source), Path(target)
    if target.exists() and target.samefile(path):
        raise ValueError(f"target must be another file than the source: got {target}")
    contents = _of_directory(path) if path.is_dir() else _of_file(path)
    chosen = {name: _type_of(name, contents.tensors, kind) for name in contents.tensors}
    with replacing(target) as draft:
        _write(draft, contents, chosen, kind, progress, path)
    counts: Counter[str] = Counter()
    for name, packed in chosen.items():
        counts[contents.tensors[name].type.name if packed is None else packed.name] += 1
    return dict(counts.most_common())


@dataclass(frozen=True)
class _Matrix:
    """A tensor to be written.

    Attributes:
        shape: In torch's order.
        type: The format's type of it as it is.
        octets: Its bytes as it is, uint8.
        numbers: Its numbers, of any floating dtype.
    """

    shape: tuple[int, ...]
    type: Any
    octets: Callable[[], Tensor]
    numbers: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        from gguf.constants import GGML_QUANT_SIZES

        numbers, octets = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // numbers * octets


@dataclass(frozen=True)
class _Contents:
    """What a file to be written holds: keys with values and how they are stored, and tensors."""

    keys: Sequence[tuple[str, Any, Any, Any]]
    tensors: Mapping[str, _Matrix]


def _of_file(path: Path) -> _Contents:
    from gguf import GGUFReader
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    file = GGUFFile(path)
    keys = []
    for field in GGUFReader(path).fields.values():
        if not field.name.startswith("GGUF."):
            of_array = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if of_array else None
            keys.append((field.name, field.contents(), field.types[0], inner))
    tensors = {
        name: _Matrix(
            entry.shape,
            GGMLQuantizationType(entry.type_id),
            partial(file.octets, name),
            partial(file.tensor, name),
        )
        for name, entry in file.tensors.items()
    }
    return _Contents(keys, tensors)


def _of_directory(path: Path) -> _Contents:
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    made = export(path)
    keys: list[tuple[str, Any, Any, Any]] = []
    for name, value in made.metadata.items():
        if isinstance(value, list):
            inner = GGUFValueType.get_type(value[0])
            keys.append((name, value, GGUFValueType.ARRAY, inner))
        else:
            whole = type(value) is int  # llama.cpp reads counts and ids without a sign
            kind = GGUFValueType.UINT32 if whole else GGUFValueType.get_type(value)
            keys.append((name, value, kind, None))

    def octets(tensor: Tensor) -> Tensor:
        return tensor.float().contiguous().view(-1).view(torch.uint8)

    def numbers(tensor: Tensor) -> Tensor:
        return tensor

    tensors = {
        name: _Matrix(
            tuple(tensor.shape),
            GGMLQuantizationType.F32,
            partial(octets, tensor),
            partial(numbers, tensor),
        )
        for name, tensor in made.tensors.items()
    }
    return _Contents(keys, tensors)


def _write(
    draft: Path,
    contents: _Contents,
    chosen: Mapping[str, BlockType | None],
    kind: BlockType,
    progress: Progress,
    source: Path,
) -> None:
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    architecture = next(value for key, value, *_ in contents.keys if key == _SETTLED[0])
    writer: Any = GGUFWriter(draft, architecture)
    for name, value, stored, inner in contents.keys:
        if name not in _SETTLED:
            writer.add_key_value(name, value, stored, sub_type=inner)
    writer.add_file_type(_file_type(kind))
    writer.add_quantization_version(2)
    sizes = []
    for name, matrix in contents.tensors.items():
        made = chosen[name]
        raw, count = matrix.type, matrix.num_bytes
        if made is not None:
            raw = GGMLQuantizationType(made.number)
            count = prod(matrix.shape[:-1]) * made.row_octets(matrix.shape[-1])
        sizes.append(count)
        # Of a dtype whose shape is that of numbers, whatever the blocks.
        writer.add_tensor_info(name, matrix.shape, np.dtype("int8"), count, raw_dtype=raw)
    writer.write_header_to_file(draft)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for file in writer.fout:
        file.flush()
    align = writer.data_alignment
    ends = [draft.stat().st_size, *sizes]  # each is filled up to a multiple of the alignment
    _warn(contents, chosen, kind, source, sum(-(-size // align) * align for size in ends))
    for done, (name, matrix) in enumerate(contents.tensors.items()):
        progress("quantizing", done, len(chosen))
        writer.write_tensor_data(_octets(name, matrix, chosen[name]).numpy())
    progress("quantizing", len(chosen), len(chosen))
    writer.close()


def _warn(
    contents: _Contents,
    chosen: Mapping[str, BlockType | None],
    kind: BlockType,
    source: Path,
    size: int,
) -> None:
    """Warns where the new file gains nothing, or packs what was packed before."""
    files = source.glob("*.safetensors") if source.is_dir() else [source]
    before = sum(file.stat().st_size for file in files)
    packed = {name: each for name, each in chosen.items() if each is not None}
    again = Counter(
        contents.tensors[name].type.name
        for name, each in packed.items()
        if contents.tensors[name].type.name not in ("F32", "F16", "BF16", "F64", each.name)
    )
    if size < before and not again:
        return
    length = f"{size / 1e6:,.1f} MB, the source has {before / 1e6:,.1f}"
    said = [f"the new file will have {length}"]
    if again:
        old = ", ".join(f"{count} {name}" for name, count in again.most_common())
        said.append(
            f"{sum(again.values())} tensors are quantized already ({old}) and lose more than the "
            "original weights would"
        )
    other = _SMALLER.get(kind.name)
    fallbacks = sum(each.name == other for each in packed.values())
    if fallbacks:
        said.append(
            f"{fallbacks} tensors become {other}, since their rows are no multiple of "
            f"{kind.numbers} numbers"
        )
    warnings.warn("; ".join(said), stacklevel=4)


def _type_of(name: str, tensors: Mapping[str, _Matrix], kind: BlockType) -> BlockType | None:
    """The type that a tensor is packed to; None: it stays as it is."""
    shape = tensors[name].shape
    if len(shape) < 2 or not name.endswith("weight") or any(part in name for part in _KEPT):
        return None
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    if name == head and kind.name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K"):
        kind = block_type("Q6_K")
    if shape[-1] % kind.numbers:
        kind = block_type(_SMALLER.get(kind.name, kind.name))
    return None if shape[-1] % kind.numbers else kind


def _octets(name: str, matrix: _Matrix, kind: BlockType | None) -> Tensor:
    if kind is None or matrix.type.name == kind.name:
        return matrix.octets()
    numbers = matrix.numbers()
    try:
        return pack(numbers.view(-1, numbers.shape[-1]), kind)
    except ValueError as error:
        raise CheckpointError(f"tensor {shortened(name)}: {error}") from error


def _file_type(kind: BlockType) -> int:
    """GGUF's number for the type of most tensors of a file."""
    from gguf.constants import LlamaFileType

    names = {member.name: member.value for member in LlamaFileType}
    for name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_S", f"MOSTLY_{kind}_MOE"):
        if name in names:
            return int(names[name])
    return int(LlamaFileType.GUESSED)
