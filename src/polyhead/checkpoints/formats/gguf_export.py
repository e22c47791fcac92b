"""A Hugging Face directory as what a GGUF file holds: settings, tokenizer, tensors.

It is the way of reading backwards: a family writes config.json's keys, its ``Gguf`` says what the
format calls them, and its table of tensors has an inverse. No list says which models a GGUF
architecture can express: settings are read back, and have to mean the same configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhead.checkpoints.formats.hugging_face import read_directory
from polyhead.checkpoints.formats.parts import Parts
from polyhead.checkpoints.tokenizers.gguf_vocabulary import vocabulary
from polyhead.config import RopeConfig, TransformerConfig
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import Family, families, find_gguf, read_settings
from polyhead.families.common import config_json
from polyhead.families.common.gguf import SETTINGS, WINDOWS
from polyhead.families.common.gguf_rope import UNROTATED
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.writing import write_common
from polyhead.layers.frequencies import inverse_frequencies

_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_FREQUENCIES = "rope_freqs.weight"
# They change no number that a trained model computes, or the tokenizer's keys say them.
_NOT_COMPARED = frozenset(("initial", "dropout", "bos_token_id", "eos_token_ids", "pad_token_id"))


@dataclass(frozen=True)
class Export:
    """What a GGUF file will hold.

    Attributes:
        metadata: By the format's keys.
        tensors: By the format's names, as floats of any dtype.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def export(directory: Path) -> Export:
    """Reads a directory for writing it as a GGUF file.

    Raises:
        ConfigError: No GGUF architecture says the same as its config.json, or its tokenizer has no
            form there; by name.
        CheckpointError: A file is corrupt, or there is no tokenizer.
    """
    parts = read_directory(directory)
    if parts.tokenizer is None:
        raise CheckpointError(
            f"{directory} holds no tokenizer.json, and a GGUF file holds a tokenizer"
        )
    words = vocabulary(parts.tokenizer, parts.config.vocab_size, directory)
    return as_gguf(parts, words, directory)


def as_gguf(parts: Parts, words: Mapping[str, Any], where: Path) -> Export:
    """A model as a GGUF file, of the architecture of its family or of another that says the same.

    Args:
        parts: The model's configuration, weights and tokenizer.
        words: Keys of its tokenizer.
        where: Name of the target, for error messages.

    Raises:
        ConfigError: There is none.
    """
    refused: list[str] = []
    for family in _candidates(parts):
        try:
            return _as(family, parts, words, where)
        except ConfigError as error:
            refused.append(str(error))
    raise ConfigError(
        f"{where}: model_type {parts.family!r} cannot be written as a GGUF file: {refused[0]}"
    )


def _candidates(parts: Parts) -> Iterable[Family]:
    """Families with a GGUF architecture, the model's own first."""
    forms = [form for each in families().values() for form in each.for_each_gguf()]
    known = [form for form in forms if form.gguf is not None and form.gguf.saved]
    return sorted(known, key=lambda family: family.model_type != parts.family)


def _as(family: Family, parts: Parts, words: Mapping[str, Any], where: Path) -> Export:
    """A model as a GGUF file of a family.

    Raises:
        ConfigError: The file would mean another model.
    """
    gguf, config = family.gguf, parts.config
    if gguf is None:
        raise ConfigError(f"GGUF files of {family.model_type} are not read")
    values = config_json.write_config(config, [family])
    settings, extras = _settings(family, values, config)
    architecture = {"general.architecture": gguf.arch}
    named = {f"{gguf.arch}.{key}": value for key, value in settings.items()}
    # Norms in 16 bits would lose digits where the format adds 1 to them.
    state = {name: t.float() if t.ndim < 2 else t for name, t in parts.state.items()}
    try:
        held = gguf.settings_held(state, len(config.layers))
        tensors = gguf.table(family.tensors_of(values)).to_theirs(state, config)
    except (RuntimeError, LookupError) as error:
        raise ConfigError(f"tensors do not fit the GGUF architecture {gguf.arch!r}") from error
    tensors |= extras
    metadata = {**architecture, **named, **held, **words}
    _prove(metadata, tensors, config, where)
    return Export(metadata, tensors)


def _settings(
    family: Family, values: Mapping[str, Any], config: TransformerConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings without the architecture's prefix, and tensors that are settings."""
    gguf: Any = family.gguf
    spelt = {theirs: shared for shared, theirs in family.aliases.items()}
    keys = {spelt.get(key, key): value for key, value in values.items()} | dict(values)
    kinds = keys.get("layer_types") or ()
    if FULL in kinds:
        keys.setdefault("sliding_window_pattern", kinds.index(FULL) + 1)
    common = write_common(config)
    settings: dict[str, Any] = dict(gguf.constants)
    for setting, key in {**SETTINGS, **gguf.settings}.items():
        if setting in WINDOWS and key == WINDOWS[setting]:
            settings[setting] = [kind == SLIDING for kind in kinds]
            continue
        value = common.get(SETTINGS.get(setting, "")) if key is None else keys.get(key)
        if isinstance(value, int | float):
            settings[setting] = value
    if "attention.key_length" in settings and "attention.value_length" not in gguf.settings:
        settings["attention.value_length"] = settings["attention.key_length"]
    rotated: list[Any] = [each.attention for each in config.layers]
    rotated = [each for each in rotated if getattr(each, "rope", None) is not None]
    rotated.sort(key=lambda each: each.rope.type == "default")
    extras: dict[str, Tensor] = {}
    if rotated:
        rope, size = rotated[0].rope, rotated[0].rope_head_dim
        settings.setdefault("rope.freq_base", rope.theta)
        if "rope.dimension_count" not in gguf.settings:
            settings["rope.dimension_count"] = rope.dim or size
        scaling, extras = _scaling(rope, rope.dim or size)
        settings |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    if not gguf.causal:
        settings["attention.causal"] = False
    settings |= gguf.settings_of(config)
    return {key: value for key, value in settings.items() if value != []}, extras


def _scaling(rope: RopeConfig, dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Of the rotary embedding, settings under ``rope.scaling.``, and tensors.

    Raises:
        ConfigError: The format has no such scaling.
    """
    trained = {"original_context_length": rope.original_max_positions}
    if rope.type == "default":
        return {}, {}
    if rope.type == "linear":
        return {"type": "linear", "factor": rope.factor}, {}
    if rope.type == "yarn":
        betas = {"yarn_beta_fast": rope.beta_fast, "yarn_beta_slow": rope.beta_slow}
        stated = {key: value for key, value in betas.items() if value is not None}
        return {"type": "yarn", "factor": rope.factor, **trained, **stated}, {}
    if rope.type == "llama3":  # worked out: a divisor for every pair
        plain, _ = inverse_frequencies(RopeConfig(rope.theta, dim=rope.dim), dim)
        scaled, _ = inverse_frequencies(rope, dim)
        return {}, {_FREQUENCIES: plain / scaled}
    if rope.type == "longrope":
        factors = {
            name: torch.tensor(getattr(rope, field), dtype=torch.float32, device="cpu")
            for field, name in _ROPE.items()
        }
        _, factor = inverse_frequencies(rope, dim)
        return {"attn_factor": factor, **trained}, factors
    if rope.type == "proportional" and rope.factor in (None, 1.0):
        pairs = (rope.rotated or dim) // 2  # divisors of the others turn them by nothing
        divisors = [1.0] * pairs + [UNROTATED] * (dim // 2 - pairs)
        return {}, {_FREQUENCIES: torch.tensor(divisors, dtype=torch.float32, device="cpu")}
    raise ConfigError(f"GGUF files have no rope type {rope.type!r}")


def _prove(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    config: TransformerConfig,
    where: Path,
) -> None:
    """Raises ConfigError unless settings and tensors are read back as what they were."""
    family = find_gguf(metadata, where)
    gguf: Any = family.gguf
    held = {key: as_stored(value) for key, value in metadata.items()}
    settings = read_settings(
        gguf, held, tensors, where, lambda name: tensors[name].flatten().tolist()
    )
    named = f"as GGUF architecture {gguf.arch!r}"
    again = settings.read(
        lambda values: config_json.read_config(
            family, values, named, shown=settings.shown, hints=settings.hints
        )
    )
    lost = config_json.differences(_compared(config), _compared(again))
    if lost:
        raise ConfigError(f"{named} it would lose {lost[0]}")


def as_stored(value: Any) -> Any:
    """A number as a GGUF file gives it back: floats have 32 bits there."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _compared(config: TransformerConfig) -> Any:
    """A configuration's data without what is not compared, rotary embeddings as frequencies."""
    found = _stripped(config.to_dict())
    for name in ("layers", "encoder_layers"):
        for layer, data in zip(getattr(config, name), found.get(name, ()), strict=False):
            rope = getattr(layer.attention, "rope", None)
            if rope is None:
                continue
            dim = rope.dim or layer.attention.rope_head_dim
            ends = (1, config.max_positions, 8 * config.max_positions)
            turned = [inverse_frequencies(rope, dim, length) for length in ends]
            data["attention"]["rope"] = [
                (factor, [f"{each:.5e}" for each in frequencies.tolist()])
                for frequencies, factor in turned
            ]
    return found


def _stripped(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _stripped(each) for key, each in data.items() if key not in _NOT_COMPARED}
    if isinstance(data, list | tuple):
        return [_stripped(each) for each in data]
    return data
