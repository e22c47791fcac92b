"""What a layer remembers of a sequence, as plain data: the kinds of memory of head layouts.

A ``HeadLayout`` lists its memories. Caches make room for them, the planner counts them and files
name them, all by the questions that every memory answers here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import prod

from polyhead._utils.checks import check_int, check_one_of
from polyhead.errors import ConfigError

STATE_DTYPES = ("float32", "float64", "bfloat16", "float16")


class Memory(ABC):
    """One thing that a layer remembers; a layer's memories differ by name.

    Its size per batch row is ``row_elements(spare) + units · unit_elements``, where ``units`` is
    the number of whole units of ``unit_tokens`` tokens.
    """

    name: str

    @property
    def unit_elements(self) -> int:
        """Numbers that ``unit_tokens`` more tokens add to a row; 0: the memory does not grow."""
        return 0

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return 1

    @property
    def token_elements(self) -> float:
        """Numbers that one more token adds to a row, on average."""
        return self.unit_elements / self.unit_tokens

    def row_elements(self, spare: int = 0) -> int:
        """Numbers of a row however many tokens it has.

        Args:
            spare: Tokens that must be possible to roll back.
        """
        return 0

    @property
    def read_elements(self) -> int:
        """Numbers of a row, however many tokens it has, that a decoding step reads."""
        return self.row_elements()

    @property
    def dtype_name(self) -> str | None:
        """Dtype of its numbers; None: that of the layer's keys and inputs."""
        return None

    @property
    def keys_and_values(self) -> PerToken | None:
        """The memory itself if it is keys and values of each token."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """Last tokens that it remembers; None: all."""
        return None

    @property
    def borrowed(self) -> PerToken | None:
        """Keys and values that another layer remembers; None: this layer remembers it itself."""
        return None

    @property
    @abstractmethod
    def valid(self) -> bool:
        """Whether its sizes are whole numbers above 0."""


@dataclass(frozen=True)
class PerToken(Memory):
    """A key and a value of every token.

    Attributes:
        num_kv_heads: Keys, and values.
        key_dim: Features of a key.
        value_dim: Features of a value.
        latent: Whether the value is the first ``value_dim`` columns of the key: one memory.
        name: Its name among the layer's memories.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    name: str = "kv"

    @property
    def elements(self) -> int:
        """Numbers per token."""
        return self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))

    @property
    def unit_elements(self) -> int:
        return self.elements

    @property
    def keys_and_values(self) -> PerToken | None:
        return self

    @property
    def valid(self) -> bool:
        return _sizes(self.num_kv_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Recent(PerToken):
    """A key and a value of each of the last tokens.

    Attributes:
        window: How many.
    """

    window: int = field(kw_only=True)

    @property
    def most_tokens(self) -> int | None:
        return self.window

    @property
    def valid(self) -> bool:
        return super().valid and _sizes(self.window)


@dataclass(frozen=True)
class OfLayer(Memory):
    """What another layer remembers, read from there: no numbers of its own.

    Attributes:
        layer: Number of that layer.
        keys: Its keys and values.
        name: Its name among the layer's memories.
    """

    layer: int
    keys: PerToken
    name: str = "kv"

    @property
    def borrowed(self) -> PerToken | None:
        return self.keys

    @property
    def valid(self) -> bool:
        return type(self.layer) is int and self.layer >= 0 and self.keys.valid


@dataclass(frozen=True)
class State(Memory):
    """One tensor per batch row, of one size however many tokens there are.

    It holds the states before the last call and after its last tokens too, which take room for
    ``spare + 1`` more.

    Attributes:
        name: Its name among the layer's memories.
        shape: Of one row, such as (H, K, V).
        dtype: Dtype, whatever that of the layer's inputs; but float32 is float64 beside float64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, STATE_DTYPES, error=ConfigError)

    def row_elements(self, spare: int = 0) -> int:
        return (2 + spare) * prod(self.shape)

    @property
    def read_elements(self) -> int:
        return prod(self.shape)

    @property
    def dtype_name(self) -> str | None:
        return self.dtype

    @property
    def valid(self) -> bool:
        return bool(self.shape) and _sizes(*self.shape)


@dataclass(frozen=True)
class Tail(Memory):
    """The last inputs of a causal convolution; zeros stand before a sequence.

    Attributes:
        name: Its name among the layer's memories.
        width: Features of an input.
        tokens: Inputs before the next one that it needs: its kernel size − 1.
    """

    name: str
    width: int
    tokens: int

    def row_elements(self, spare: int = 0) -> int:
        return (self.tokens + 1 + spare) * self.width

    @property
    def valid(self) -> bool:
        return _sizes(self.width, self.tokens)


@dataclass(frozen=True)
class TokenIds(Tail):
    """The last ids of tokens, or other whole numbers of them, in int64."""

    @property
    def dtype_name(self) -> str | None:
        return "int64"


@dataclass(frozen=True)
class Pooled(Memory):
    """One entry for each ``every`` whole tokens, such as a compressed block or a block's key.

    Attributes:
        name: Its name among the layer's memories.
        width: Features of an entry.
        every: Tokens of an entry.
    """

    name: str
    width: int
    every: int

    @property
    def unit_elements(self) -> int:
        return self.width

    @property
    def unit_tokens(self) -> int:
        return self.every

    @property
    def valid(self) -> bool:
        return _sizes(self.width, self.every)


def check_spare(spare: int) -> int:
    """``spare`` as a whole number of at least 0; raises ConfigError otherwise."""
    return check_int("spare", spare, least=0, error=ConfigError)


def _sizes(*sizes: object) -> bool:
    return all(type(size) is int and size > 0 for size in sizes)
