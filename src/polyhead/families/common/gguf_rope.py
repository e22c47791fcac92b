"""The scaling of rotary embeddings in GGUF files: settings, and tensors that are settings too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from polyhead.errors import ConfigError
from polyhead.families.common.keys import Keys

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
UNROTATED = 1e30
"""The divisor of the frequencies of pairs that do not turn (Gemma 4)."""
_YARN_FIELDS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_tensors(tensors: Collection[str]) -> frozenset[str]:
    """Names of a file's tensors that are settings of the rotary embedding, not weights."""
    both = {_LONG, _SHORT} if _LONG in tensors and _SHORT in tensors else set()
    return frozenset(name for name in (_FREQUENCIES, *both) if name in tensors)


def read_scaling(
    keys: Keys,
    values: dict[str, Any],
    tensors: Collection[str],
    numbers: Callable[[str], Sequence[float]],
) -> None:
    """``rope.scaling.*`` as config.json's ``rope_scaling``.

    Args:
        keys: Keys of the file.
        values: config.json's keys so far; takes what is found.
        tensors: Tensors of the file, as ``rope_tensors`` found them.
        numbers: Reads one of them.

    Raises:
        ConfigError: A scaling that is not understood, by the setting's name.
    """
    long = _LONG in tensors
    kind = keys.take("rope.scaling.type", "longrope" if long else "linear")
    factor = keys.number("rope.scaling.factor", None) or keys.number("rope.scale_linear", None)
    if kind not in ("none", "linear", "yarn") and not (long and kind == "longrope"):
        raise keys.refused("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")
    original = keys.whole("rope.scaling.original_context_length", None)
    trained = original or keys.whole("context_length")
    scaling: dict[str, Any] = {"rope_type": "longrope" if long else kind, "factor": factor}
    if long:
        # A divisor for the frequency of every pair, in short and in long sequences.
        scaling["short_factor"], scaling["long_factor"] = (
            [float(each) for each in numbers(name)] for name in (_SHORT, _LONG)
        )
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor", None)
        values["original_max_position_embeddings"] = trained
    elif kind == "yarn":
        keys.expect("rope.scaling.attn_factor", 1.0)
        keys.expect("rope.scaling.yarn_ext_factor", 1.0)
        keys.expect("rope.scaling.yarn_attn_factor", 1.0)
        for setting, field in _YARN_FIELDS.items():
            scaling[field] = keys.number(f"rope.scaling.{setting}", None)
        scaling["original_max_position_embeddings"] = trained
    if long or (kind != "none" and (factor or 1.0) != 1.0):
        values["rope_scaling"] = {key: v for key, v in scaling.items() if v is not None}
    if _FREQUENCIES in tensors:
        _worked_out(keys, values, numbers)


def _worked_out(
    keys: Keys, values: dict[str, Any], numbers: Callable[[str], Sequence[float]]
) -> None:
    """Llama 3's scaling arrives worked out: a divisor for the frequency of every rotated pair.

    That is what ``longrope`` computes when its short and long factors are the same.
    """
    if (scaling := values.get("rope_scaling")) is not None:
        raise ConfigError(
            f"{keys.where}: {_FREQUENCIES} together with rope scaling {scaling['rope_type']!r} "
            "is not supported"
        )
    divisors = [float(each) for each in numbers(_FREQUENCIES)]
    values["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.whole("context_length"),
    }
