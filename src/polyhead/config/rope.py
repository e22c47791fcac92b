"""Rotary positions as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import Data
from polyhead.errors import ConfigError, shortened

RopeType = Literal[
    "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "explicit"
]


_OF_ALL = ("theta", "type", "dim", "sections", "interleaved_sections")
# Required and optional fields of each scaling type, beside those of all.
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
    "proportional": ((), ("factor", "rotated")),
    "explicit": (("frequencies",), ("attention_factor",)),
}


@dataclass(frozen=True)
class RopeConfig(Data):
    """Rotary position embedding (Su et al. 2021) and its scaling, in the names of config.json.

    ``dim`` is the number of rotated features of a head (None: all of them). ``frequencies`` of the
    type ``"explicit"`` are radians per position, one for each rotated pair; ``theta`` is then not
    read. ``rotated`` of the type ``"proportional"`` is the number of features whose pairs turn: the
    first of a head and as many behind its middle.

    ``sections`` is for tokens at several coordinates, such as time, height and width (M-RoPE; Wang
    et al. 2024, Qwen2-VL, §2.1): how many frequencies each coordinate turns, the fastest by the
    first. ``interleaved_sections`` (Qwen3-VL): coordinates take turns instead, pair i by coordinate
    i mod C while i < C · sections[i mod C], and by the first beyond. Both are of any type, and
    without effect where all coordinates of a token are equal, as in text.

    The other fields belong to the scaling types that read them; see
    ``polyhead.layers.frequencies``. A field that the type does not read is refused: a model with
    half of its scaling would load without error and be wrong.

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
    frequencies: tuple[float, ...] | None = None
    rotated: int | None = None
    sections: tuple[int, ...] | None = None
    interleaved_sections: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or self.type not in _ROPE_FIELDS:
            raise ConfigError(
                f"rope type must be one of {', '.join(_ROPE_FIELDS)}: got {shortened(self.type)}"
            )
        if not self.theta > 0:
            raise ConfigError(f"rope theta must be positive: got {self.theta!r}")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(f"rope dim must be an even number of features: got {self.dim!r}")
        if self.type == "dynamic" and self.dim == 2:
            raise ConfigError("rope type 'dynamic' needs at least 4 rotated features: got dim=2")
        needed, optional = _ROPE_FIELDS[self.type]
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in needed and value is None:
                raise ConfigError(f"rope type {self.type!r} needs {name}: got None")
            if name in _OF_ALL or name in needed or name in optional:
                continue
            if value != field.default:
                raise ConfigError(f"rope type {self.type!r} does not read {name}: got {value!r}")
        if self.factor is not None and not self.factor > 0:
            raise ConfigError(f"rope factor must be positive: got {self.factor!r}")
        for name in ("beta_fast", "beta_slow"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"rope {name} must be at least 0: got {getattr(self, name)!r}")
        if self.rotated is not None and (self.rotated < 0 or self.rotated % 2):
            raise ConfigError(f"rope rotated must be an even number: got {self.rotated!r}")
        if self.sections is not None and (len(self.sections) < 2 or min(self.sections) < 0):
            raise ConfigError(
                "rope sections must be two or more whole numbers from 0, one of each coordinate: "
                f"got {self.sections!r}"
            )
        if self.interleaved_sections and self.sections is None:
            raise ConfigError("rope interleaved_sections needs sections: got None")
        if self.type == "yarn" and self.theta == 1:
            raise ConfigError("rope type 'yarn' needs another theta than 1")
        if self.type == "longrope" and self.factor is None and self.attention_factor is None:
            raise ConfigError("rope type 'longrope' needs factor or attention_factor: got neither")
        for name in ("short_factor", "long_factor", "frequencies"):
            factors = getattr(self, name)
            if factors is not None and self.dim is not None and len(factors) != self.dim // 2:
                raise ConfigError(
                    f"rope {name} needs one number per rotated pair, {self.dim // 2}: got "
                    f"{len(factors)}"
                )
