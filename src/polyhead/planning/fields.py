"""The fields of a config.json under their several names, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.errors import ConfigError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff", "ffn_dim"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
    ),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token", "moe_topk"),
}

_MOST, _MOST_LAYERS = 10**12, 10_000
"""More of anything, or more layers, has no model."""


class Fields:
    """The fields of one config.json.

    Args:
        values: Its object.
        where: The file, for messages.
        defaults: What absent fields mean.
    """

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
        self.values, self.where, self.defaults = values, where, defaults

    def get(self, name: str, default: Any = None) -> Any:
        """The field under any of its names; null counts as absent."""
        for key in ALIASES.get(name, (name,)):
            if self.values.get(key) is not None:
                return self.values[key]
        return self.defaults.get(name, default)

    def count(self, name: str) -> int:
        """A whole number of at least 0, which it is where the field is absent."""
        return self._checked(name, self.get(name, 0), least=0)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        Raises:
            ConfigError: It is absent without a default, or something else.
        """
        value = self.get(name, default)
        if value is None:
            names = " or ".join(repr(key) for key in ALIASES.get(name, (name,)))
            raise ConfigError(f"{self.where}: field {names} is missing")
        return self._checked(name, value, least=1)

    def optional(self, name: str) -> int | None:
        """A whole number of at least 1, or None."""
        value = self.get(name)
        return None if value is None else self._checked(name, value, least=1)

    def per_layer(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """A number for all layers, or a list with one for each."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple):
            return [self.whole(name, default)] * layers
        if len(value) != layers:
            raise ConfigError(
                f"{self.where}: {name} must be one number or one for each of num_hidden_layers="
                f"{layers} layers: got {len(value)}"
            )
        return [self._checked(name, each, least=1) for each in value]

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, value, "true or false")
        return value

    def refused(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} must be {wanted}: got {_short(value)}")

    def _checked(self, name: str, value: Any, *, least: int) -> int:
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refused(name, value, f"a whole number of at least {least}")
        if value > most:
            raise self.refused(name, value, f"a whole number of at most {most:,}")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
