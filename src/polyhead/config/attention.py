"""The parts of a Transformer layer as plain data that round-trips through JSON.

Each part (rotary positions, norm, attention, feed-forward) has its own frozen dataclass; the
modules beside this file are built from them, ``layer_config`` composes them into a layer and
``polyhead.models.config`` layers into a model. Latent attention and mixtures of experts have files
of their own.

Every ``from_dict`` refuses unknown keys by name: a key that nobody understands is a model that
would load cleanly and be wrong.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """JSON round trip for nested frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """This configuration as plain dicts, lists, numbers, strings and None."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds it; raises ConfigError naming an unknown, missing or misshapen key."""
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"{cls.__name__}: unknown key {unknown[0]!r}; known keys are "
                f"{', '.join(sorted(known))}"
            )
        try:
            return cls(**{name: _revive(hints[name], value) for name, value in data.items()})
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))


def _revive(hint: Any, value: Any) -> Any:
    """Turns JSON's dicts and lists back into the dataclasses and tuples that ``hint`` names."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _revive(inner[0] if len(inner) == 1 else _meant(inner, value), value)
    if origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(_revive(item, entry) for entry in value)
    if isinstance(hint, type) and issubclass(hint, Data) and isinstance(value, Mapping):
        return hint.from_dict(value)
    return value


def _meant(hints: list[type[Data]], value: Any) -> type[Data]:
    """Of several dataclasses the one most of whose required fields ``value`` has."""

    def share(hint: type[Data]) -> float:
        names = [f.name for f in dataclasses.fields(hint) if _is_required(f)]
        return sum(name in value for name in names) / len(names)

    return max(hints, key=share) if isinstance(value, Mapping) else hints[0]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


# What each scaling type must have, and what it may have besides; theta and dim belong to all.
_ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_positions"), ()),
    "llama3": (("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", "original_max_positions"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("original_max_positions", "short_factor", "long_factor"),
        ("factor", "attention_factor"),
    ),
}


@dataclass(frozen=True)
class RopeConfig(Data):
    """Rotary position embedding (Su et al. 2021) and its scaling, in the names of config.json.

    ``dim`` is the number of rotated features of a head (None: all of them). The other fields
    belong to the scaling types that read them; see ``polyhead.layers.frequencies``. A field that
    the type does not read is refused: a scaling that is half applied loads cleanly and is wrong.

    Raises:
        ConfigError: An unknown type, a field that is missing, or one that the type does not read.
    """

    theta: float = 10_000.0
    type: RopeType = "default"
    dim: int | None = None
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in _ROPE_FIELDS:
            raise ConfigError(
                f"rope type must be one of {', '.join(_ROPE_FIELDS)}: got {self.type!r}"
            )
        if not self.theta > 0:
            raise ConfigError(f"rope theta must be positive: got {self.theta!r}")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(f"rope dim must be an even number of features: got {self.dim!r}")
        needed, optional = _ROPE_FIELDS[self.type]
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in needed and value is None:
                raise ConfigError(f"rope type {self.type!r} needs {name}: got None")
            if name in ("theta", "type", "dim") or name in needed or name in optional:
                continue
            if value != field.default:
                raise ConfigError(f"rope type {self.type!r} does not read {name}: got {value!r}")
        if self.type == "longrope" and self.factor is None and self.attention_factor is None:
            raise ConfigError("rope type 'longrope' needs factor or attention_factor: got neither")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and self.dim is not None and len(factors) != self.dim // 2:
                raise ConfigError(
                    f"rope {name} needs one number per rotated pair, {self.dim // 2}: got "
                    f"{len(factors)}"
                )


@dataclass(frozen=True)
class NormConfig(Data):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019).

    ``weight_offset`` is added to the stored weight (1.0 in Gemma, whose files store weight - 1).
    """

    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    eps: float = 1e-5
    bias: bool = False
    weight_offset: float = 0.0


@dataclass(frozen=True)
class QKNormConfig(Data):
    """Normalised queries and keys; ``place`` is where, since three families do it differently.

    ``"before_rope"``: per head, before rotary (Qwen3, Gemma 3). ``"after_rope"``: per head, after
    rotary. ``"full_width"``: over all heads at once, before the split (OLMo 2).
    """

    norm: NormConfig = NormConfig()
    place: Literal["before_rope", "after_rope", "full_width"] = "before_rope"


@dataclass(frozen=True)
class AttentionConfig(Data):
    """One attention layer. ``num_kv_heads``: H is MHA, 1 is MQA, a divisor of H between is GQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None  # None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    rope: RopeConfig | None = None
    qk_norm: QKNormConfig | None = None
    window: int | None = None  # keys including the query itself
    softcap: float | None = None
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    sinks: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1: got {value!r}")
        if self.num_heads % self.num_kv_heads:
            divisors = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise ConfigError(
                f"num_kv_heads must divide num_heads: got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}; use one of {divisors}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1 key or None: got {self.window!r}")
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be positive or None (off): got {self.softcap!r}")

    @property
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""
        return self.head_dim


@dataclass(frozen=True)
class FeedForwardConfig(Data):
    """A position-wise feed-forward network; ``gated`` multiplies by a second projection (GLU).

    silu + gated is SwiGLU, gelu or gelu_tanh + gated is GeGLU (Shazeer 2020).
    """

    hidden_dim: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "silu"
    gated: bool = True
    bias: bool = False
    dropout: float = 0.0
