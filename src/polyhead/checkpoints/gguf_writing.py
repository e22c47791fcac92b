"""A GGUF file with its weights in blocks of another type.

Settings, tokenizer and small tensors stay as they are. The ``gguf`` package writes the file, one
tensor after the other.
"""

from __future__ import annotations

import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyhead.checkpoints.gguf_file import GGUFFile, TensorEntry
from polyhead.checkpoints.parts import Progress, no_progress
from polyhead.errors import CheckpointError
from polyhead.quantization import BlockType, block_type, pack, packable
from polyhead.writing import replacing

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
    fewer bits. Rows that are not whole blocks of 256 take the type of 32 numbers that is next in
    bits (Q4_K: Q5_0), those that are not whole blocks of 32 stay as they are.

    Args:
        source: A GGUF file. Weights that are quantised already are unpacked and packed anew, which
            loses more than packing the original weights.
        target: The file to write.
        kind: One of ``packable()``.
        progress: Called after every tensor.

    Returns:
        How many tensors the file has of each type.

    Raises:
        ValueError: A type that is only read, or the source as target.
        CheckpointError: The source is corrupt, or holds weights that are not finite.
        OSError: The target cannot be written.
    """
    from gguf import GGUFReader, GGUFWriter
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    if kind.name not in packable():
        raise ValueError(f"type must be one of {', '.join(packable())}: got {kind.name}")
    path, target = Path(source), Path(target)
    if target.exists() and target.samefile(path):
        raise ValueError(f"target must be another file than the source: got {target}")
    file = GGUFFile(path)
    chosen = {name: _type_of(entry, file, kind) for name, entry in file.tensors.items()}
    with replacing(target) as draft:
        writer: Any = GGUFWriter(draft, file.metadata["general.architecture"])
        for field in GGUFReader(path).fields.values():
            if field.name.startswith("GGUF.") or field.name in _SETTLED:
                continue
            of_array = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if of_array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_file_type(_file_type(kind))
        writer.add_quantization_version(2)
        for name, entry in file.tensors.items():
            made = chosen[name]
            raw = GGMLQuantizationType(entry.type_id if made is None else made.number)
            # Of a dtype whose shape is that of numbers, whatever the blocks.
            shape, dtype = entry.shape, np.dtype("int8")
            writer.add_tensor_info(name, shape, dtype, _num_bytes(entry, made), raw_dtype=raw)
        writer.write_header_to_file(draft)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, name in enumerate(file.tensors):
            progress("quantising", done, len(chosen))
            writer.write_tensor_data(_octets(file, name, chosen[name]).numpy())
        progress("quantising", len(chosen), len(chosen))
        writer.close()
    counts: Counter[str] = Counter()
    for name, packed in chosen.items():
        counts[file.tensors[name].type_name if packed is None else packed.name] += 1
    return dict(counts.most_common())


def _type_of(entry: TensorEntry, file: GGUFFile, kind: BlockType) -> BlockType | None:
    """The type that a tensor is packed to; None: it stays as it is."""
    name, shape = entry.name, entry.shape
    if len(shape) < 2 or not name.endswith("weight") or any(part in name for part in _KEPT):
        return None
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    if name == head and kind.name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K"):
        kind = block_type("Q6_K")
    if shape[-1] % kind.numbers:
        kind = block_type(_SMALLER.get(kind.name, kind.name))
    return None if shape[-1] % kind.numbers else kind


def _num_bytes(entry: TensorEntry, kind: BlockType | None) -> int:
    if kind is None:
        return entry.num_bytes
    return prod(entry.shape[:-1]) * kind.row_octets(entry.shape[-1])


def _octets(file: GGUFFile, name: str, kind: BlockType | None) -> Tensor:
    if kind is None or file.tensors[name].type_name == kind.name:
        return file.octets(name)
    numbers = file.tensor(name)
    try:
        return pack(numbers.view(-1, numbers.shape[-1]), kind)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {name!r}: {error}") from error


def _file_type(kind: BlockType) -> int:
    """GGUF's number for the type of most tensors of a file."""
    from gguf.constants import LlamaFileType

    names = {member.name: member.value for member in LlamaFileType}
    for name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_S", f"MOSTLY_{kind}_MOE"):
        if name in names:
            return int(names[name])
    return int(LlamaFileType.GUESSED)
