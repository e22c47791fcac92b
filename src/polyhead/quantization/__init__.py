"""Numbers in blocks of a few bits, as files hold weights: their types, unpacked and packed."""

from polyhead.quantization.blocks import BlockType, block_type, block_types
from polyhead.quantization.packing import pack, packable
from polyhead.quantization.scaled import of_rows
from polyhead.quantization.unpacking import readable, unpack

__all__ = [
    "BlockType",
    "block_type",
    "block_types",
    "of_rows",
    "pack",
    "packable",
    "readable",
    "unpack",
]
