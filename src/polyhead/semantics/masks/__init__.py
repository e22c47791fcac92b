"""Masks: typed expressions over absolute positions that say which queries see which keys.

Causal() & Window(4096)                 a sliding window
Prefix(10) | Causal()                   a prefix seen by everyone (prefix LM)
Causal() & Documents([5, 3, 8])         packed documents that do not see each other
KeyLengths([7, 9])                      right-padded keys
BlockSparse(blocks, 64) & Causal()      blocks of keys for each block of queries
Chosen(blocks, 64) & Causal()           blocks of keys that each query chose
Keep(allowed) & ~Prefix(4)              an explicit tensor, and a complement
"""

from polyhead.semantics.masks.algebra import (
    And,
    Mask,
    Not,
    Or,
    Range,
    Visibility,
    bare_tensor_message,
)
from polyhead.semantics.masks.block_sparse import BlockSparse
from polyhead.semantics.masks.chosen import Chosen
from polyhead.semantics.masks.explicit import Drop, Keep, check_broadcast, of_heads, of_tokens
from polyhead.semantics.masks.packed import Documents, KeyLengths
from polyhead.semantics.masks.positional import Causal, Chunk, Prefix, Window

__all__ = [
    "And",
    "BlockSparse",
    "Causal",
    "Chosen",
    "Chunk",
    "Documents",
    "Drop",
    "Keep",
    "KeyLengths",
    "Mask",
    "Not",
    "Or",
    "Prefix",
    "Range",
    "Visibility",
    "Window",
    "bare_tensor_message",
    "check_broadcast",
    "of_heads",
    "of_tokens",
]
