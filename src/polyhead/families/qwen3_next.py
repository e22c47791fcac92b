"""Qwen3-Next and Qwen3.5 (2025, 2026): three layers of gated DeltaNet for each of gated attention.

Norms multiply by one plus the stored weight, but for the norm of a DeltaNet head's output. A
quarter of a head is rotated, in Qwen3.5 by three coordinates, which in text are the same.
Qwen3-Next joins a DeltaNet layer's projections by key head; Qwen3.5 stores them side by side.
Layers of multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead.config import (
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedDeltaNetConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import DRAFTS, STACKED_EXPERTS, drafting
from polyhead.families.common.plain import Plain
from polyhead.families.common.reading import FULL, LINEAR, read_layer_types, read_network
from polyhead.families.common.steps import At, Pieces, QKVOfStates, Shaped, Step
from polyhead.families.common.tables import AROUND_LAYERS, FREQUENCIES, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.qwen3_next_gguf import NEXT, THREE_FIVE, THREE_FIVE_MOE
from polyhead.families.qwen_moe import (
    EXPERTS,
    HARMLESS,
    SHARED,
    read_mixture,
    sparse_layers,
    write_experts,
)

MIXTURE = (*EXPERTS, *STACKED_EXPERTS, *SHARED)
"""Names of experts and of the shared one."""
_EVERY = 4
DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# Published files name the dtype of states too, which here are float32 or that of weights if more.
UNUSED = frozenset(("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"))


@dataclass(frozen=True)
class PerKeyHead(Pieces):
    """Cut rows that stand together for each key head, such as ``[q | k | v | gate]``.

    Attributes:
        keys: Pieces of ``head_k_dim`` rows; the others are of the value heads of a key head,
        values: so many, of ``head_v_dim`` rows for a value head, and
        numbers: so many, of one row for a value head.
    """

    keys: int = 0
    values: int = 0
    numbers: int = 0
    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return self.keys + self.values + self.numbers

    def _sizes(self, at: At) -> list[int]:
        a = at.attention
        each = a.num_heads // a.num_key_heads
        return [
            *[a.head_k_dim] * self.keys,
            *[each * a.head_v_dim] * self.values,
            *[each] * self.numbers,
        ]

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        heads, sizes = at.attention.num_key_heads, self._sizes(at)
        if tensor.shape[0] != heads * sum(sizes):
            return tensor.tensor_split(len(sizes))  # misshapen: reported when the state is checked
        rows = tensor.reshape(heads, sum(sizes), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(rows, sizes, dim=1)]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        heads = at.attention.num_key_heads
        parts = [each.reshape(heads, -1, *each.shape[1:]) for each in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class QueryAndGate(Pieces):
    """Cut the rows of each head, ``[q | gate]``."""

    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return 2

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        heads = at.attention.num_heads
        if tensor.shape[0] % (2 * heads):
            return tensor.tensor_split(2)
        rows = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return [rows[:, i].flatten(0, 1) for i in range(2)]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        heads = at.attention.num_heads
        parts = [each.reshape(heads, -1, *each.shape[1:]) for each in tensors]
        return torch.stack(parts, dim=1).flatten(0, 2)


def read(
    keys: Keys,
    *,
    dense: bool,
    sparse: bool,
    rotated: float = 0.25,
    kinds: Sequence[str] = (LINEAR, FULL),
    kind: type[GatedAttentionConfig] = GatedAttentionConfig,
    interleaved_sections: bool | None = True,
    **heads: Any,
) -> TransformerConfig:
    """The configuration that the keys mean.

    Args:
        keys: Keys of config.json.
        dense: Whether layers may have a dense network.
        sparse: Whether layers may have a mixture of experts.
        rotated: Part of a head that is rotated where the file does not say.
        kinds: What ``layer_types`` may hold; all but the first are gated attention.
        kind: Of gated attention.
        interleaved_sections: As of ``read_rope``.
        **heads: Further fields of it.
    """
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    keys.expect("attn_output_gate", True)
    network = (
        read_network(keys) if dense else FeedForwardConfig(keys.whole("moe_intermediate_size"))
    )
    plain = Plain(
        keys,
        norm=norm,
        network=network,
        partial_rotary_factor=rotated,
        interleaved_sections=interleaved_sections,
    )
    sizes = plain.sizes
    full = plain.attention(kind=kind, qk_norm=QKNormConfig(norm), **heads)
    state = GatedDeltaNetConfig(
        keys.size("linear_num_value_heads"),
        keys.size("linear_num_key_heads"),
        keys.size("linear_key_head_dim"),
        keys.size("linear_value_head_dim"),
        keys.whole("linear_conv_kernel_dim"),
        norm_eps=norm.eps,
    )
    networks: list[FeedForwardConfig | MixtureConfig] = [network] * sizes.num_layers
    if sparse:
        normalize = keys.flag("norm_topk_prob") if dense else True
        mixture = read_mixture(keys, shared=True, normalize=normalize)
        chosen = sparse_layers(keys, sizes.num_layers) if dense else range(sizes.num_layers)
        networks = [mixture if i in chosen else network for i in range(sizes.num_layers)]
    every = keys.size("full_attention_interval", _EVERY)
    default = layer_types({"num_hidden_layers": sizes.num_layers, "full_attention_interval": every})
    found = read_layer_types(keys, sizes.num_layers, default, kinds)
    return plain.decoder(
        [
            plain.layer(state if each == LINEAR else full, network)
            for each, network in zip(found, networks, strict=True)
        ]
    )


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """What each layer is, from config.json's object."""
    every = values.get("full_attention_interval") or _EVERY
    default = [FULL if (i + 1) % every == 0 else LINEAR for i in range(values["num_hidden_layers"])]
    return values.get("layer_types") or default


def write(config: TransformerConfig, *, mixed: bool = True) -> dict[str, Any]:
    """Keys of these families alone.

    Args:
        config: To be written.
        mixed: Whether the family has the keys that say which layers are dense.
    """
    found = [layer.attention for layer in config.layers]
    full: Any = next((each for each in found if isinstance(each, GatedAttentionConfig)), None)
    state: Any = next((each for each in found if type(each) is GatedDeltaNetConfig), None)
    if full is None or state is None:
        raise ConfigError("this family needs layers of gated attention and of gated DeltaNet")
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    dense = [i for i, each in enumerate(networks) if isinstance(each, FeedForwardConfig)]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    values = {
        "partial_rotary_factor": (full.rope.dim or full.head_dim) / full.head_dim,
        "linear_num_value_heads": state.num_heads,
        "linear_num_key_heads": state.num_key_heads,
        "linear_key_head_dim": state.head_k_dim,
        "linear_value_head_dim": state.head_v_dim,
        "linear_conv_kernel_dim": state.conv_kernel,
        "layer_types": [LINEAR if each == state else FULL for each in found],
    }
    if mixture is not None:
        values |= write_experts(mixture, dense)
        for key in () if mixed else ("mlp_only_layers", "norm_topk_prob"):
            del values[key]
    if dense:
        values["intermediate_size"] = networks[dense[0]].hidden_dim
    return values


def tensors(values: Mapping[str, Any], *, joined: bool) -> Tensors:
    """The table of names; a layer's own depend on what it is.

    Args:
        values: config.json's object.
        joined: Whether the projections of a DeltaNet layer are joined by key head.
    """
    rules = [
        rule.at(i)
        for i, kind in enumerate(layer_types(values))
        for rule in attention_rules(kind, joined=joined)
    ]
    return Tensors((*AROUND_LAYERS, *NORMS, *rules, *NETWORK, *MIXTURE), dropped=dropped(values))


def dropped(values: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that no output depends on, and why."""
    return FREQUENCIES | {r"mtp\..+": DRAFTS} | drafting(values, "mtp_num_hidden_layers")


def attention_rules(kind: str, *, joined: bool) -> list[Rule]:
    """Rules of a layer's attention or states.

    Args:
        kind: What the layer is.
        joined: As in ``tensors``.
    """
    theirs, ours = "layers.{i}.self_attn.", "layers.{i}.attention."
    if kind != LINEAR:
        same = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        heads = Rule(theirs + "q_proj", _under(ours, "q gate"), QueryAndGate())
        return [*under(theirs, ours, {name: name for name in same}), heads]
    theirs = "layers.{i}.linear_attn."
    # The convolution has one channel per row, and a dimension of size 1.
    rules = [Rule(theirs + "conv1d.weight", ours + "conv_weight", Shaped((1,)))]
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "norm": "norm", "out_proj": "o_proj"}
    rules += under(theirs, ours, names)
    step: Step = PerKeyHead(keys=2, values=2) if joined else QKVOfStates()
    if joined:
        rules.append(Rule(theirs + "in_proj_qkvz", _under(ours, "q k v gate"), step))
        numbers = PerKeyHead(numbers=2)
        return [*rules, Rule(theirs + "in_proj_ba", _under(ours, "beta decay"), numbers)]
    rules.append(Rule(theirs + "in_proj_qkv", _under(ours, "q k v"), step))
    apart = {"z": "gate", "b": "beta", "a": "decay"}
    names = {f"in_proj_{left}": f"{right}_proj" for left, right in apart.items()}
    return [*rules, *under(theirs, ours, names)]


def _under(ours: str, names: str) -> list[str]:
    return [f"{ours}{name}_proj" for name in names.split()]


FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3Next",
        partial(read, dense=True, sparse=True, interleaved_sections=None),
        partial(tensors, joined=True),
        defaults={
            **DEFAULTS,
            **_EXPERTS,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        write=write,
        harmless=HARMLESS,
        gguf=NEXT,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5",
        partial(read, dense=True, sparse=False),
        partial(tensors, joined=False),
        defaults={**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12_288},
        write=write,
        harmless=UNUSED,
        gguf=THREE_FIVE,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        partial(read, dense=False, sparse=True),
        partial(tensors, joined=False),
        defaults={
            **DEFAULTS,
            **_EXPERTS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        write=partial(write, mixed=False),
        harmless=HARMLESS | UNUSED,
        gguf=THREE_FIVE_MOE,
    ),
)
