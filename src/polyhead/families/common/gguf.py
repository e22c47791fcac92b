"""GGUF files: their settings as config.json's keys, and their names of tensors.

Both are composed with what a family states for Hugging Face directories: settings become the
family's own keys, which its own reader reads, and names come from the ``gguf`` package's map from
Hugging Face's names. A family states what llama.cpp's converter changes beyond that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.gguf_rope import read_scaling, rope_tensors
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.steps import At, Each, PerExpert, Plus, RotaryPairs, Step
from polyhead.families.common.tensors import Rule, Tensors

SETTINGS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "logit_scale": "logit_scale",
}
"""Settings under the architecture's prefix, as shared keys of config.json."""
WINDOWS = {"attention.sliding_window_pattern": ".windows"}
"""Settings of families where a file says of every layer whether it has a window."""
# They change no number that the model computes.
_HARMLESS = frozenset(
    ("pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "use_parallel_residual")
)


# Settings that may differ between layers.
_BY_LAYER = frozenset(("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
# Lists that are taken as they are, and settings that are texts.
_LISTS = frozenset((*WINDOWS, "activation_sparsity_scale"))
_TEXTS = frozenset(("hidden_act",))
SIGMOID: Mapping[str, int] = {"expert_gating_func": 2}
"""Of mixtures that score experts by a sigmoid each."""
EXPERTS = tuple(
    Rule(
        f"blk.{{i}}.ffn_{name}_exps",
        f"layers.{{i}}.feed_forward.experts.{{j}}.{name}_proj",
        PerExpert(),
    )
    for name in ("gate", "up", "down")
)
"""Names of experts for families whose Hugging Face files fuse gate and up, or order them
differently."""
EXPERT_BY_EXPERT = tuple(
    Rule(
        f"blk.{{i}}.ffn_{name}.{{j}}",
        f"layers.{{i}}.feed_forward.experts.{{j}}.{name}_proj",
    )
    for name in ("gate", "up", "down")
)
"""Names in files of 2023 and early 2024, whose experts are not stacked."""
PAIRS: Mapping[str, tuple[Step | Each, ...]] = {
    f"layers.{{i}}.self_attn.{name}_proj": (RotaryPairs(),) for name in "qk"
}
"""llama.cpp turns neighbours, so its converter reorders the rows of Llama and its kin."""


def _no_more(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _no_settings(config: TransformerConfig) -> Mapping[str, Any]:
    return {}


def _any_file(metadata: Mapping[str, Any]) -> bool:
    return True


def layer_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """``layer_types`` from ``WINDOWS``, which is a list of flags."""
    windows = values.get(".windows")
    if not isinstance(windows, list):
        return {}
    return {"layer_types": [SLIDING if each else FULL for each in windows]}


def shape_of(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The shape of a tensor of the file, from what ``Gguf.values`` is given.

    Raises:
        ConfigError: It is missing.
    """
    found = values[".tensors"].get(name)
    if found is None:
        raise ConfigError(f"tensor {name!r} is missing")
    return tuple(found.shape)


def has_experts(metadata: Mapping[str, Any]) -> bool:
    """Whether layers are mixtures of experts."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.expert_count"))


@dataclass(frozen=True)
class Joined:
    """A tensor that newer files hold in parts.

    Attributes:
        whole: Name of the joined tensor.
        parts: The names in the file; ``{i}`` is a layer's number.
        join: How the parts are put together.
    """

    whole: str
    parts: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class _PlusToWeights(Plus):
    """Adds to the weights of norms; their biases stay."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor if at.name.endswith(".bias") else super().changed(tensor, at)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor if at.name.endswith(".bias") else super().restored(tensor, at)


@dataclass(frozen=True)
class Gguf:
    """How GGUF files of a family differ from its Hugging Face directories.

    Attributes:
        arch: ``general.architecture``.
        settings: Settings under its prefix beyond the shared ones, as keys of config.json;
            None: the setting changes nothing; with a dot before it, for ``values`` alone.
        constants: Settings that mean what the family computes anyway; they may be absent.
        steps: By a rule's name of the Hugging Face tensor, what takes the place of its steps,
            because the converter has done them or does others.
        names: By the same, the GGUF name, where the package's map knows none.
        rules: With GGUF names, where the converter cuts what Hugging Face's files fuse.
        joined: Tensors that come in parts.
        norms: What the converter adds to the weights of norms.
        causal: Whether a query sees no key after it.
        values: From the keys so far, further ones that the format leaves to the reader;
            ``".tensors"`` is the file's tensors by name, which have a shape.
        settings_of: From the configuration, settings that no single key of config.json says.
        fits: Whether a file of the architecture, by its metadata, is of this family.
        saved: Whether models are written as this architecture too.
    """

    arch: str
    settings: Mapping[str, str | None] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, tuple[Step | Each, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    joined: tuple[Joined, ...] = ()
    norms: float = 0.0
    causal: bool = True
    values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_more
    settings_of: Callable[[TransformerConfig], Mapping[str, Any]] = _no_settings
    fits: Callable[[Mapping[str, Any]], bool] = _any_file
    saved: bool = True

    def table(self, table: Tensors) -> Tensors:
        """The family's table with GGUF names."""
        rules = [*self.rules]
        named = {name for rule in rules for name in rule.ours}
        for rule in (*table.rules, *table.outside):
            if {name.removesuffix(".weight").removesuffix(".bias") for name in rule.ours} <= named:
                continue
            theirs = self.names.get(rule.theirs) or self._name(rule.theirs, table.prefix)
            if theirs is None:
                continue
            steps: Sequence[Step | Each] = self.steps.get(rule.theirs, rule.steps)
            if "{j}" in rule.theirs and not rule.stacks:
                steps = (PerExpert(), *steps)
            if self.norms and all(name.endswith("norm") for name in rule.ours):
                steps = (*steps, _PlusToWeights(-self.norms))
            rules.append(rule.with_(theirs, *steps))
        dropped = {
            pattern.replace(r"layers\.", r"blk\."): why for pattern, why in table.dropped.items()
        }
        return Tensors(tuple(rules), prefix="", outside=(), dropped=dropped)

    def whole(
        self, names: Iterable[str], tensor: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """A file's tensors, of those that come in parts the whole one, each read when called."""
        by_part = {part: each for each in self.joined for part in each.parts}
        for name in names:
            number = re.search(r"(?<=^blk\.)\d+", name)
            i = number[0] if number else ""
            joined = by_part.get(name.replace(f"blk.{i}.", "blk.{i}.", 1))
            if joined is None:
                yield name, partial(tensor, name)
            elif name == joined.parts[0].format(i=i):
                parts = [part.format(i=i) for part in joined.parts]
                yield joined.whole.format(i=i), partial(_joined, joined, parts, tensor)

    def _name(self, theirs: str, prefix: str) -> str | None:
        """The package's name, with ``{i}`` for the layer's number."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.arch)
        names = get_tensor_name_map(arch, 1)
        of_layer = re.search(r"(?<=layers\.)\d+(?=\.)", theirs)
        number = of_layer[0] if of_layer else "{i}"
        bare = theirs.replace(f"layers.{number}.", "layers.0.").replace(".{j}", "").format(i=0)
        for key in (prefix + bare, bare, "model." + bare):
            found = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return str(found).replace("blk.0.", f"blk.{number}.")
        return None


def _joined(joined: Joined, parts: Sequence[str], tensor: Callable[[str], Tensor]) -> Tensor:
    return joined.join([tensor(part) for part in parts])


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
    for key in ("max_position_embeddings", "hidden_size", "num_attention_heads"):
        if key not in values:
            setting = next(name for name, known in SETTINGS.items() if known == key)
            raise ConfigError(f"{where}: key {gguf.arch + '.' + setting!r} is missing")
    head_dim = values.get("head_dim") or values["hidden_size"] // max(
        1, values["num_attention_heads"]
    )
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
    biased = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    count = special.whole("token_type_count", None)
    segments = {} if count is None else {"type_vocab_size": count}
    return {
        "vocab_size": len(special.texts("tokens", [])),
        "attention_bias": any(name in tensors for name in biased),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "lm_head_bias": "output.bias" in tensors,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1,
        "partial_rotary_factor": 1.0,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
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
    if not isinstance(value, list) or setting.startswith("rope.") or setting in _LISTS:
        return value
    same = len({*map(repr, value)}) == 1
    if len(value) != layers or not (same or setting in _BY_LAYER):
        alike = "" if setting in _BY_LAYER else " that are the same"
        raise keys.refused(setting, value, f"one number, or {layers}{alike}")
    return value[0] if same else value
