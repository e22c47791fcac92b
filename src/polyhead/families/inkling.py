"""Inkling (Thinking Machines 2026): short convolutions of keys, of values and of what parts give,
queries that mix profiles of distances in place of positions, and shared experts that the router
weighs beside routed ones.

Layers with a window have numbers of heads and sizes of their own (``swa_``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead.config import (
    DistanceProfilesAttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    TransformerConfig,
    WeighedSharedConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import DRAFTS, STACKED_EXPERTS, write_dense_layers
from polyhead.families.common.reading import (
    read_activation,
    read_decoder,
    read_layer_types,
    read_rms_norm,
)
from polyhead.families.common.steps import Alternating, At, PerExpert, Pieces, Shaped
from polyhead.families.common.tables import AROUND_LAYERS
from polyhead.families.common.tensors import Rule, Tensors, under

_FULL, _SLIDING = _KINDS = ("hybrid", "hybrid_sliding")
_DENSE, _SPARSE = "dense", "sparse"
_DEFAULTS: Mapping[str, Any] = {
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": None,
    "log_scaling_alpha": 0.1,
    "local_layer_ids": None,
    "layer_types": None,
    "mlp_layer_types": None,
    "model_max_length": 131_072,
    "rms_norm_eps": 1e-6,
    "sconv_kernel_size": 4,
    "hidden_act": "silu",
    "moe_intermediate_size": 3072,
    "num_local_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "embedding_multiplier": 24.0,
    "unpadded_vocab_size": None,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def read(keys: Keys) -> TransformerConfig:
    norm, count = read_rms_norm(keys), keys.num_layers("num_hidden_layers")
    keys.expect("tie_word_embeddings", False)  # transformers' class ties nothing
    attentions = _read_attentions(keys, norm)
    kernel = keys.size("sconv_kernel_size")
    kinds = read_layer_types(keys, count, _default_types(keys, count), _KINDS)
    networks, default = _read_networks(keys), _network_types(count, keys.whole("dense_mlp_idx", 0))
    parts = read_layer_types(keys, count, default, (_DENSE, _SPARSE), "mlp_layer_types")
    layers = [
        LayerConfig(
            replace(attentions[kind], conv_kernel=kernel),
            networks[network],
            norm,
            out_convolution=kernel,
            feed_forward_scale=True,
        )
        for kind, network in zip(kinds, parts, strict=True)
    ]
    vocab_size = keys.whole("vocab_size")
    return read_decoder(
        keys,
        layers,
        max_positions=keys.whole("model_max_length"),
        norm=norm,
        embedding=EmbeddingConfig(norm=norm),
        logit_scale=1.0 / keys.positive("embedding_multiplier"),
        unused_ids=max(0, vocab_size - keys.size("unpadded_vocab_size", vocab_size)),
    )


def _read_attentions(keys: Keys, norm: NormConfig) -> dict[str, DistanceProfilesAttentionConfig]:
    window, floor = keys.size("sliding_window"), keys.size("log_scaling_n_floor", None)
    alpha = keys.number("log_scaling_alpha")
    found = {}
    for kind, prefix, extent in (
        (_FULL, "", keys.size("rel_extent")),
        (_SLIDING, "swa_", window),
    ):
        head_dim, is_full = keys.size(f"{prefix}head_dim"), kind == _FULL
        found[kind] = DistanceProfilesAttentionConfig(
            keys.size(f"{prefix}num_attention_heads"),
            keys.size(f"{prefix}num_key_value_heads"),
            head_dim,
            qk_norm=QKNormConfig(norm),
            window=None if is_full else window,
            query_temperature=(
                QueryTemperatureConfig(alpha, floor, offset=1, steps=False)
                if is_full and floor is not None
                else None
            ),
            scale=1.0 / head_dim,  # norms make queries and keys as long as √head_dim
            dropout=keys.number("attention_dropout"),
            profiles=keys.size("d_rel"),
            extent=extent,
        )
    return found


def _default_types(keys: Keys, count: int) -> list[str]:
    """What layers are where the file does not say by ``layer_types``."""
    local = keys.take("local_layer_ids", None)
    if local is None:
        return [_SLIDING if (i + 1) % 6 else _FULL for i in range(count)]
    return [_SLIDING if i in keys.wholes("local_layer_ids") else _FULL for i in range(count)]


def _network_types(count: int, first_sparse: int) -> list[str]:
    """What networks are where the file does not say by ``mlp_layer_types``."""
    return [_DENSE if i < first_sparse else _SPARSE for i in range(count)]


def _read_networks(keys: Keys) -> dict[str, FeedForwardConfig | WeighedSharedConfig]:
    """Published files call the width of a dense network another name, and that of an expert its."""
    width, expert = keys.size("intermediate_size"), keys.size("moe_intermediate_size")
    if (dense := keys.size("dense_intermediate_size", None)) is not None:
        width, expert = dense, width
    network = FeedForwardConfig(width, read_activation(keys))
    mixture = WeighedSharedConfig(
        replace(network, hidden_dim=expert),
        keys.size("num_local_experts"),
        keys.size("num_experts_per_tok"),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
        scale=keys.number("route_scale"),
        num_shared=keys.size("n_shared_experts"),
    )
    return {_DENSE: network, _SPARSE: mixture}


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    if any(each.kind != "distance_profiles" for each in found):
        raise ConfigError("in this family every layer mixes profiles of distances")
    of_kind = {_FULL if each.window is None else _SLIDING: each for each in found}
    values = {
        "d_rel": found[0].profiles,
        "conv_kernel_size": found[0].conv_kernel,
        "layer_types": [_FULL if each.window is None else _SLIDING for each in found],
        "logits_mup_width_multiplier": 1.0 / config.logit_scale,
        "unpadded_vocab_size": config.num_logits,
        **write_dense_layers(config),
    }
    for kind, each in of_kind.items():
        prefix = "" if kind == _FULL else "swa_"
        values |= {
            f"{prefix}num_attention_heads": each.num_heads,
            f"{prefix}num_key_value_heads": each.num_kv_heads,
            f"{prefix}head_dim": each.head_dim,
            "rel_extent" if kind == _FULL else "sliding_window_size": each.extent,
        }
    warm = of_kind[_FULL].query_temperature if _FULL in of_kind else None
    if warm is not None:
        values |= {"log_scaling_n_floor": warm.every, "log_scaling_alpha": warm.scale}
    for network in networks:
        if network.kind == "plain":
            values |= {"intermediate_size": network.hidden_dim, "hidden_act": network.activation}
            continue
        values |= {
            "moe_intermediate_size": network.expert.hidden_dim,
            "hidden_act": network.expert.activation,
            "n_routed_experts": network.num_experts,
            "num_experts_per_tok": network.experts_per_token,
            "n_shared_experts": network.num_shared,
            "route_scale": network.scale,
        }
    return values


@dataclass(frozen=True)
class Unstacked(Pieces):
    """Cut into a tensor of each shared expert, which the file stacks."""

    moves_rows: ClassVar[bool] = True
    pieces: int

    def count(self, at: At) -> int:
        return self.pieces

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor.unbind()

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        return torch.stack(tuple(tensors))


_LAYER, _MIXTURE = "layers.{i}.", "layers.{i}.feed_forward."
_MODULES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "feed_forward_norm": ("post_attention_layernorm", "mlp_norm"),
    "attention.q_proj": ("self_attn.q_proj", "attn.wq_du"),
    "attention.k_proj": ("self_attn.k_proj", "attn.wk_dv"),
    "attention.v_proj": ("self_attn.v_proj", "attn.wv_dv"),
    "attention.o_proj": ("self_attn.o_proj", "attn.wo_ud"),
    "attention.q_norm": ("self_attn.q_norm", "attn.q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn.k_norm"),
    "attention.profile_proj": ("self_attn.r_proj", "attn.wr_du"),
    "attention.profiles": ("self_attn.rel_logits_proj.proj", "attn.rel_logits_proj.proj"),
    "feed_forward.down_proj": ("mlp.down_proj", "mlp.w2_md"),
    "feed_forward.choice_bias": ("mlp.gate.e_score_correction_bias", "mlp.gate.bias"),
}
_CONVOLUTIONS = {
    "attention.k_convolution": ("self_attn.k_sconv.conv1d", "attn.k_sconv"),
    "attention.v_convolution": ("self_attn.v_sconv.conv1d", "attn.v_sconv"),
    "attention_convolution": ("attn_sconv.conv1d", "attn_sconv"),
    "feed_forward_convolution": ("mlp_sconv.conv1d", "mlp_sconv"),
}
"""Names in transformers' files, and in those that were published."""
_GATE_AND_UP = "gate_proj", "up_proj"


def _named(column: int) -> tuple[Rule, ...]:
    convolved = (
        Rule(_LAYER + t[column], _LAYER + o, Shaped((1,))) for o, t in _CONVOLUTIONS.items()
    )
    renamed = {theirs[column]: ours for ours, theirs in _MODULES.items()}
    return (*under(_LAYER, _LAYER, renamed), *convolved)


_RULES = (
    *_named(0),
    *under(_LAYER + "mlp.", _MIXTURE, {name: name for name in _GATE_AND_UP}),
    *under(_LAYER + "mlp.", _LAYER, {"gate": "feed_forward.router"}),
    Rule(_LAYER + "mlp.global_scale", _LAYER + "feed_forward_scale"),
    *STACKED_EXPERTS,
)
_PUBLISHED = (
    *_named(1),
    Rule("embed", "embedding.tokens"),
    Rule("embed_norm", "embedding.norm"),
    Rule(_LAYER + "mlp.w13_dn", [_MIXTURE + name for name in _GATE_AND_UP], Alternating()),
    Rule(
        _LAYER + "mlp.experts.w13_weight",
        [f"{_MIXTURE}experts.{{j}}.{name}.weight" for name in _GATE_AND_UP],
        PerExpert(),
        Alternating(),
    ),
    Rule(
        _LAYER + "mlp.experts.w2_weight",
        _MIXTURE + "experts.{j}.down_proj.weight",
        PerExpert(),
    ),
)
"""In the published files rows of gates and of what they gate take turns."""


def _shared(first: int, count: int) -> Iterator[Rule]:
    """Of shared experts, which stand behind the others here."""
    for theirs, names, steps in (
        ("gate_proj", ("gate_proj",), ()),
        ("up_proj", ("up_proj",), ()),
        ("down_proj", ("down_proj",), ()),
        ("shared_w13_weight", _GATE_AND_UP, (Alternating(),)),
        ("shared_w2_weight", ("down_proj",), ()),
    ):
        ours = [
            f"{_MIXTURE}experts.{first + i}.{name}.weight" for i in range(count) for name in names
        ]
        yield Rule(f"{_LAYER}mlp.shared_experts.{theirs}", ours, Unstacked(count), *steps)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """Where the scale of a network stands depends on what it is."""
    routed, shared = (
        next((values[key] for key in keys if key in values), default)
        for keys, default in (
            (("n_routed_experts", "num_local_experts"), _DEFAULTS["num_local_experts"]),
            (("n_shared_experts",), _DEFAULTS["n_shared_experts"]),
        )
    )
    count = values["num_hidden_layers"]
    default = _network_types(count, values.get("dense_mlp_idx") or 0)
    kinds = values.get("mlp_layer_types") or default
    scales = (
        Rule(f"layers.{i}.mlp.gate.global_scale", f"layers.{i}.feed_forward_scale")
        for i, kind in enumerate(kinds)
        if kind == _SPARSE
    )
    around = (*AROUND_LAYERS, Rule("embed_tokens.embed_norm", "embedding.norm"))
    heads = Rule("lm_head", "head"), Rule("unembed", "head")
    return Tensors(
        (*scales, *around, *_shared(routed, shared), *_RULES, *_PUBLISHED),
        outside=heads,
        dropped={r"mtp\..+": DRAFTS},
    )


FAMILIES = (
    Family(
        "inkling_text",
        "Inkling",
        read,
        tensors,
        defaults=_DEFAULTS,
        aliases={
            "sliding_window": "sliding_window_size",
            "model_max_length": "max_position_embeddings",
            "sconv_kernel_size": "conv_kernel_size",
            "num_local_experts": "n_routed_experts",
            "embedding_multiplier": "logits_mup_width_multiplier",
        },
        write=write,
        bare="TextModel",
        harmless=frozenset(
            (
                # transformers' class reads none of these.
                "shared_expert_sink",
                "rms_norm_eps_moe_gate",
                "number_of_conv_states",
                # Of layers that predict further tokens.
                "num_mtp_layers",
                "chain_hidden_post_norm",
                "mtp_hidden_states_first",
                "mtp_local_layer_ids",
            )
        ),
    ),
)
