"""The types of blocks that GGUF files have.

A row of numbers is cut into blocks of 32 or 256. Each block holds a code of a few bits for every
number, and what the codes are scaled with. Names, sizes and meaning are the ``gguf`` package's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from polyhead.errors import shortened

# Numbers as they are: torch has these dtypes.
_PLAIN = frozenset(("F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64"))


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        number: As GGUF files and native code call it.
    """

    name: str
    number: int
    numbers: int
    octets: int

    def row_octets(self, numbers: int) -> int:
        """Bytes of a row of so many numbers.

        Raises:
            ValueError: They are not a whole number of blocks.
        """
        if numbers % self.numbers:
            raise ValueError(
                f"{self.name} has blocks of {self.numbers} numbers: got rows of {numbers}"
            )
        return numbers // self.numbers * self.octets

    def row_numbers(self, octets: int) -> int:
        """Numbers of a row of so many bytes."""
        if octets % self.octets:
            raise ValueError(f"{self.name} has blocks of {self.octets} bytes: got rows of {octets}")
        return octets // self.octets * self.numbers

    def __str__(self) -> str:
        return self.name


@cache
def block_types() -> Mapping[str, BlockType]:
    """All types by name."""
    from gguf.constants import GGML_QUANT_SIZES

    return {
        kind.name: BlockType(kind.name, int(kind), *sizes)
        for kind, sizes in GGML_QUANT_SIZES.items()
        if kind.name not in _PLAIN
    }


def block_type(name: str) -> BlockType:
    """A type by its name.

    Raises:
        ValueError: There is none of that name.
    """
    found = block_types().get(name)
    if found is None:
        raise ValueError(f"type must be one of {', '.join(block_types())}: got {shortened(name)}")
    return found
