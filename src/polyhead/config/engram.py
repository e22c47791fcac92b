"""Vectors of runs of tokens, looked up by a hash and gated by residual streams, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isqrt

from polyhead._utils.checks import check_int
from polyhead.config.data import check_whole
from polyhead.config.layout import EMBEDDING, TOKENS, CallCost, HeadLayout, Prefill
from polyhead.config.memories import Memory, Tail, TokenIds
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError

_MOST_TABLES, _MOST_ROWS, _MOST_TOKENS = 1 << 12, 1 << 28, 64
"""Limits of what a file may ask for: primes are looked for one by one."""


@dataclass(frozen=True)
class EngramConfig(HeadLayout, kind="engram"):
    """Engram (Cheng et al. 2026, arXiv 2601.07372), as Qwen4-Exp has it, in place of attention.

    The last 2, 3, … tokens up to a token are hashed, by several hashes each, to rows of tables.
    What these hold is added to all residual streams, so far as each stream's own gate lets it, and
    a convolution mixes it with that of earlier tokens. Its layer has no network.

    Attributes:
        streams: Residual streams n.
        width: Features E of each.
        vocab_size: Ids are below it; multipliers of hashes depend on it.
        end_token_id: Of which a run holds none but as its last token: it begins behind.
        dim: Features of a token's rows, side by side.
        longest: Tokens of the longest runs; at least 2.
        heads: Hashes of the runs of each length.
        table_rows: Rows of a table: the primes from this number on, one after the other.
        divisor: The rows of all tables are filled up to a multiple of it.
        seed: What the multipliers are drawn with.
        index: Number of the layer among those of its kind, which have other multipliers and primes.
        conv_kernel: Tokens that the convolution sees, ``longest`` apart; at least 2.
        norm: Over the features of a stream.

    Raises:
        ConfigError: Sizes that do not go together, or what it has no use for.
    """

    num_heads: int = 1
    streams: int = field(kw_only=True)
    width: int = field(kw_only=True)
    vocab_size: int = field(kw_only=True)
    end_token_id: int = field(kw_only=True)
    dim: int = field(kw_only=True)
    longest: int = 3
    heads: int = 8
    table_rows: int = 20_000_000
    divisor: int = 128
    seed: int = 1234
    index: int = 0
    conv_kernel: int = 4
    norm: NormConfig = field(default_factory=lambda: NormConfig(weight_offset=1.0))

    def __post_init__(self) -> None:
        for name in ("streams", "width", "vocab_size", "dim", "heads", "divisor"):
            check_whole(name, getattr(self, name))
        for name, least in (("end_token_id", 0), ("seed", 0), ("index", 0), ("conv_kernel", 2)):
            check_whole(name, getattr(self, name), least=least)
        check_int("longest", self.longest, least=2, most=_MOST_TOKENS, error=ConfigError)
        check_int("table_rows", self.table_rows, least=1, most=_MOST_ROWS, error=ConfigError)
        if (self.index + 1) * self.tables > _MOST_TABLES:
            raise ConfigError(
                f"engrams have at most {_MOST_TABLES} tables in all layers: got {self.tables} in "
                f"layer {self.index} of their kind"
            )
        if self.dim % self.tables:
            raise ConfigError(
                f"dim must be a multiple of the {self.tables} hashes of runs, (longest - 1) · "
                f"heads: got {self.dim}"
            )
        if self.num_heads != 1 or self.rope is not None or self.scale is not None or self.dropout:
            raise ConfigError(
                "an engram has one head and no rope, scale and dropout: got "
                f"num_heads={self.num_heads}, rope={self.rope}, scale={self.scale}, "
                f"dropout={self.dropout}"
            )

    @property
    def layout(self) -> str:
        return "engram"

    @property
    def described(self) -> str:
        return f"{self.layout} of up to {self.longest} tokens, {self.heads} hashes of each length"

    @property
    def tables(self) -> int:
        """Tables, one for each hash."""
        return (self.longest - 1) * self.heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return _primes(self.table_rows, self.index * self.tables, self.tables)

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return -(-sum(self.sizes) // self.divisor) * self.divisor

    @property
    def multipliers(self) -> tuple[int, ...]:
        """What the id of a run's last token is multiplied by, of the one before it, and so on."""
        bound = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        seed = self.seed + 10_007 * self.index
        return tuple(2 * (_mixed(seed, i) % bound) + 1 for i in range(self.longest))

    @property
    def channels(self) -> int:
        """Features of all streams."""
        return self.streams * self.width

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            TokenIds("tokens", 1, self.longest - 1),
            Tail("conv", self.channels, (self.conv_kernel - 1) * self.longest),
        )

    @property
    def reads(self) -> Mapping[str, int]:
        return {TOKENS: EMBEDDING}

    @property
    def reads_streams(self) -> int:
        return self.streams

    @property
    def value_dim(self) -> int:
        return self.channels

    @property
    def rope_head_dim(self) -> int:
        return self.channels

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        size = self.dim // self.tables
        yield ParameterGroup("attention", self.rows, size, multiplied=False, looked_up=True)
        yield ParameterGroup("attention", 1, (self.channels + self.width) * self.dim)
        yield ParameterGroup("attention", 1, self.channels * self.conv_kernel, as_numbers=True)
        norms = 3 * self.norm.parameters(self.channels)
        yield ParameterGroup("norms", 1, norms, multiplied=False)

    def call_cost(self, batch_size: int, queries: int, cached: int) -> CallCost:
        return CallCost(0)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        # What is added, the convolution's inputs, those beside its tail, its output and the next
        # term of that, which are in float32; the numbers of rows have 64 bits.
        return (9 if call.half else 6) * self.channels + self.dim + 4 * self.tables

    def with_num_kv_heads(self, num_kv_heads: int) -> EngramConfig:
        return self


def _mixed(seed: int, i: int) -> int:
    """The i-th number of SplitMix64 from a seed (Steele et al. 2014)."""
    word = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (i + 2)) & word
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor & word
    return z ^ (z >> 31)


@cache
def _primes(least: int, skipped: int, count: int) -> tuple[int, ...]:
    """``count`` primes behind the first ``skipped`` ones from ``least`` on."""
    found: list[int] = []
    number = least
    while len(found) < skipped + count:
        if number > 1 and all(number % d for d in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found[skipped:])
