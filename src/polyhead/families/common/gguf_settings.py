"""A GGUF file's settings as config.json's keys, which the family's own reader reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.gguf import SETTINGS, WINDOWS, Gguf
from polyhead.families.common.gguf_rope import read_scaling, rope_tensors
from polyhead.families.common.keys import Keys

# They change no number that the model computes.
_HARMLESS = frozenset(
    ("pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "use_parallel_residual")
)


# Settings that may differ between layers.
_BY_LAYER = frozenset(("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
# Lists that are taken as they are, and settings that are texts.
_LISTS = frozenset(
    (
        *WINDOWS,
        "activation_sparsity_scale",
        "attention.indexer.types",
        "rope.dimension_sections",
    )
)
_TEXTS = frozenset(("hidden_act",))
_REQUIRED = ("context_length", "embedding_length", "attention.head_count")


@dataclass(frozen=True)
class Settings:
    """A file's settings as config.json's keys.

    Attributes:
        values: By config.json's keys.
        shown: What the file calls them, for messages.
        hints: Those that follow from the file's tensors or tokenizer, which a family may not have.
        by_layer: For values that differ from layer to layer, all of them.
    """

    values: Mapping[str, Any]
    shown: Mapping[str, str]
    hints: frozenset[str]
    by_layer: Mapping[str, Sequence[Any]]

    def read(self, read: Callable[[Mapping[str, Any]], TransformerConfig]) -> TransformerConfig:
        """The configuration: a layer of it is that of a model whose layers are all alike."""
        config = read(self.values)
        if not self.by_layer:
            return config
        kinds = [
            dict(zip(self.by_layer, each, strict=True))
            for each in zip(*self.by_layer.values(), strict=True)
        ]
        kinds = kinds[: len(config.layers)]  # others predict further tokens
        layers = [read({**self.values, **kind}).layers[i] for i, kind in enumerate(kinds)]
        return replace(config, layers=tuple(layers))


def read_settings(
    gguf: Gguf,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    where: object,
    numbers: Callable[[str], Sequence[float]],
) -> Settings:
    """A file's settings.

    Args:
        gguf: What the family states for GGUF.
        metadata: Metadata of the file's header.
        tensors: The file's tensors by name; only their shapes are looked at.
        where: The file, for messages.
        numbers: Reads one of ``rope_tensors``.

    Raises:
        ConfigError: A setting is missing, impossible or not understood, by name.
    """
    keys = Keys(metadata, where, prefix=f"{gguf.arch}.")
    layers = keys.num_layers("block_count")
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}
    by_layer: dict[str, Sequence[Any]] = {}
    for setting, key in {**SETTINGS, **gguf.settings}.items():
        if not keys.has(setting):
            continue
        value = _single(keys, setting, layers)
        if key is not None:
            if isinstance(value, list) and setting in _BY_LAYER and not key.startswith("."):
                by_layer[key], value = value, value[0]
            values[key], shown[key] = value, f"{gguf.arch}.{setting}"
    for setting, constant in gguf.constants.items():
        keys.expect(setting, constant)
    keys.expect("attention.causal", gguf.causal)
    if not values.get("num_experts", True):  # 0 means none
        del values["num_experts"]
        values.pop("num_experts_per_tok", None)
    for setting in _REQUIRED:
        if not keys.has(setting):
            raise ConfigError(f"{where}: key {gguf.arch + '.' + setting!r} is missing")
    heads = values.get("num_attention_heads", 1)
    head_dim = values.get("head_dim") or values["hidden_size"] // max(1, heads)
    if "attention.value_length" not in gguf.settings:
        keys.expect("attention.value_length", head_dim, None)
    if "rope.dimension_count" not in gguf.settings:
        rotated = keys.whole("rope.dimension_count", head_dim)
        if not 2 <= rotated <= head_dim or rotated % 2:
            raise keys.refused("rope.dimension_count", rotated, f"an even number up to {head_dim}")
        if rotated != head_dim:
            values["partial_rotary_factor"] = rotated / head_dim
            shown["partial_rotary_factor"] = f"{gguf.arch}.rope.dimension_count"
    read_scaling(keys, values, rope_tensors(tensors), numbers)
    if "rope_scaling" in values:
        shown["rope_scaling"] = f"{gguf.arch}.rope.scaling"
    hints = _hints(metadata, tensors, where)
    keys.finish(_HARMLESS)
    if by_layer:
        hints["head_dim"] = head_dim
    whole = {**hints, **values}
    try:
        stated = {**whole, **gguf.values({**whole, ".tensors": tensors})}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if stated.get("rope_scaling") is None:  # or it is said in another key
        stated.pop("rope_scaling", None)
    stated = {key: value for key, value in stated.items() if not key.startswith(".")}
    return Settings(stated, shown, frozenset(hints), by_layer)


def _hints(metadata: Mapping[str, Any], tensors: Collection[str], where: object) -> dict[str, Any]:
    special = Keys(metadata, where, prefix="tokenizer.ggml.")
    biased = (".attn_q.bias", ".attn_qkv.bias")
    count = special.whole("token_type_count", None)
    segments = {} if count is None else {"type_vocab_size": count}
    return {
        "vocab_size": len(special.texts("tokens", [])),
        "attention_bias": any(name.endswith(biased) for name in tensors),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "lm_head_bias": "output.bias" in tensors,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1,
        "partial_rotary_factor": 1.0,
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
        "is_gated_act": "enc.blk.0.ffn_gate.weight" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": special.whole("bos_token_id", None),
        "eos_token_id": special.whole("eos_token_id", None),
        "pad_token_id": special.whole("padding_token_id", None),
        **segments,
    }


def _single(keys: Keys, setting: str, layers: int) -> Any:
    """A setting that files give once for all layers, or as a list with one entry per layer."""
    value = keys.take(setting)
    if setting in _TEXTS:
        return keys.text(setting)
    for each in value if isinstance(value, list) else (value,):
        # Families calculate with them before their readers see them.
        flag = isinstance(each, bool) and setting in SETTINGS
        if flag or not isinstance(each, int | float):
            raise keys.refused(setting, value, "a number")
    if not isinstance(value, list) or setting in _LISTS:
        return value
    same = len({*map(repr, value)}) == 1
    if len(value) != layers or not (same or setting in _BY_LAYER):
        alike = "" if setting in _BY_LAYER else " that are the same"
        raise keys.refused(setting, value, f"one number, or {layers}{alike}")
    return value[0] if same else value
