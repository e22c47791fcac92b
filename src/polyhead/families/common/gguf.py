"""GGUF files: what a family states of their settings, and their names of tensors.

Both are composed with what a family states for Hugging Face directories: settings become the
family's own keys, which its own reader reads (``gguf_settings.py``), and names come from the
``gguf`` package's map from Hugging Face's names. A family states what llama.cpp's converter changes
beyond that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, shortened
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.steps import At, Each, PerExpert, Plus, RotaryPairs, Rows, Step
from polyhead.families.common.tensors import Rule, Tensors

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
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
SIGMOID: Mapping[str, int] = {"expert_gating_func": 2}
"""Of mixtures that score experts by a sigmoid each."""
_EXPERT = "layers.{i}.feed_forward.experts.{j}."
EXPERTS = (
    *(
        Rule(f"blk.{{i}}.ffn_{name}_exps", f"{_EXPERT}{name}_proj", PerExpert())
        for name in ("gate", "up", "down")
    ),
    Rule(
        "blk.{i}.ffn_gate_up_exps",
        (_EXPERT + "gate_proj", _EXPERT + "up_proj"),
        PerExpert(),
        Rows(),
    ),
)
"""Names of experts for families whose Hugging Face files fuse gate and up, or order them
differently. Files of 2026 may fuse them too (``--fuse-gate-up-exps``)."""
EXPERT_BY_EXPERT = tuple(
    Rule(f"blk.{{i}}.ffn_{name}.{{j}}", f"{_EXPERT}{name}_proj") for name in ("gate", "up", "down")
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
            because the converter has done them or does others; ``{i}`` stands for a number too.
        names: By the same, the GGUF name, where the package's map knows none.
        cuts: By the same, rules with GGUF names that come before it, where the converter cuts in
            some layers what Hugging Face's files fuse; ``{i}`` is the number on both sides.
        rules: With GGUF names, where it does that in all layers.
        joined: Tensors that come in parts.
        norms: What the converter adds to the weights of norms, but for those in ``steps``.
        causal: Whether a query sees no key after it.
        values: From the keys so far, further ones that the format leaves to the reader;
            ``".tensors"`` is the file's tensors by name, which have a shape.
        settings_of: From the configuration, settings that no single key of config.json says.
        held: Tensors that are settings, a number for each layer: polyhead's name by the setting's,
            which has no prefix.
        alike: Settings without a prefix that must be this number in all layers.
        fits: Whether a file of the architecture, by its metadata, is of this family.
        saved: Whether models are written as this architecture too.
    """

    arch: str
    settings: Mapping[str, str | None] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, tuple[Step | Each, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    joined: tuple[Joined, ...] = ()
    norms: float = 0.0
    causal: bool = True
    values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _no_more
    settings_of: Callable[[TransformerConfig], Mapping[str, Any]] = _no_settings
    held: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, float] = field(default_factory=dict)
    fits: Callable[[Mapping[str, Any]], bool] = _any_file
    saved: bool = True

    def table(self, table: Tensors) -> Tensors:
        """The family's table with GGUF names."""
        rules = [*self.rules]
        named = {name for rule in rules for name in rule.ours}
        for rule in (*table.rules, *table.outside):
            if {name.removesuffix(".weight").removesuffix(".bias") for name in rule.ours} <= named:
                continue
            key, number = _by_letter(rule.theirs)
            rules += [each.at(number) for each in self.cuts.get(key, ())]
            theirs = self.names.get(key, "").replace("{i}", number)
            theirs = theirs or self._name(rule.theirs, table.prefix) or ""
            if not theirs:
                continue
            steps: Sequence[Step | Each] = self.steps.get(key, rule.steps)
            if "{j}" in rule.theirs and not rule.stacks:
                steps = (PerExpert(), *steps)
            is_norm = all(name.endswith("norm") for name in rule.ours)
            if self.norms and is_norm and key not in self.steps:
                steps = (*steps, _PlusToWeights(-self.norms))
            rules.append(rule.with_(theirs, *steps))
        dropped = {
            pattern.replace(r"layers\.", r"blk\."): why for pattern, why in table.dropped.items()
        }
        return Tensors(tuple(rules), prefix="", outside=(), dropped=dropped)

    def tensors_held(
        self, metadata: Mapping[str, Any], layers: int, where: object
    ) -> dict[str, Tensor]:
        """polyhead's tensors that are settings.

        Raises:
            ConfigError: A setting is no list of numbers, one for each layer, or another number.
        """
        made: dict[str, Tensor] = {}
        for setting in (*self.held, *self.alike):
            found = metadata.get(setting)
            if (
                not isinstance(found, list)
                or len(found) != layers
                or not all(type(each) in (int, float) for each in found)
            ):
                raise ConfigError(
                    f"{where}: {setting} must be a list of {layers} numbers: got {shortened(found)}"
                )
            constant = self.alike.get(setting)
            if constant is None:
                name = self.held[setting]
                made |= {name.format(i=i): torch.tensor([x]) for i, x in enumerate(found)}
            elif any(not math.isclose(each, constant, rel_tol=1e-2) for each in found):
                raise ConfigError(
                    f"{where}: {setting} is {shortened(found)}; supported is {constant}"
                )
        return made

    def settings_held(self, state: dict[str, Tensor], layers: int) -> dict[str, Any]:
        """The inverse: takes the tensors out of ``state``."""
        settings: dict[str, Any] = {key: [value] * layers for key, value in self.alike.items()}
        for setting, name in self.held.items():
            settings[setting] = [float(state.pop(name.format(i=i))) for i in range(layers)]
        return settings

    def whole(
        self, names: Iterable[str], tensor: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """A file's tensors, of those that come in parts the whole one, each read when called.

        Raises:
            CheckpointError: A part is missing.
        """
        names = [*names]
        by_part = {part: each for each in self.joined for part in each.parts}
        for name in names:
            number = re.search(r"(?<=^blk\.)\d+", name)
            i = number[0] if number else ""
            joined = by_part.get(name.replace(f"blk.{i}.", "blk.{i}.", 1))
            if joined is None:
                yield name, partial(tensor, name)
            elif name == joined.parts[0].format(i=i):
                parts = [part.format(i=i) for part in joined.parts]
                for part in parts:
                    if part not in names:
                        raise CheckpointError(f"tensor {part!r} is missing beside {name!r}")
                yield joined.whole.format(i=i), partial(_joined, joined, parts, tensor)

    def _name(self, theirs: str, prefix: str) -> str | None:
        """The package's name, with ``{i}`` for the layer's number."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.arch)
        names = get_tensor_name_map(arch, 1)
        _, number = _by_letter(theirs)
        bare = theirs.replace(f"layers.{number}.", "layers.0.").replace(".{j}", "").format(i=0)
        for key in (prefix + bare, bare, "model." + bare):
            found = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return str(found).replace("blk.0.", f"blk.{number}.")
        return None


def _joined(joined: Joined, parts: Sequence[str], tensor: Callable[[str], Tensor]) -> Tensor:
    try:
        return joined.join([tensor(part) for part in parts])
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"tensors {', '.join(parts)} do not fit: {error}") from error


def _by_letter(name: str) -> tuple[str, str]:
    """A rule's name with ``{i}`` for the layer's number, and the number, or ``{i}``."""
    found = _LAYER.search(name)
    return (name, "{i}") if found is None else (_LAYER.sub("{i}", name, count=1), found[0])
