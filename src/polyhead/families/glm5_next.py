"""The text model of GLM-5.3-Flash (Z.ai, 2026): Kimi delta attention of bounded decay, every fourth
layer latent attention to pools of tokens that an indexer chooses, and mixed residual streams.

Nothing is rotated. The mixture is DeepSeek-V3's, with what enters activations clamped. transformers
has no class of the text model with a head; files have published names, which it writes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    IndexerConfig,
    KimiDeltaAttentionConfig,
    LayerConfig,
    MixedConnectionsConfig,
    MixtureConfig,
    NormConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import deepseek, kimi_linear
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    drafting,
    read_networks,
    write_dense_layers,
    write_mixture,
)
from polyhead.families.common.reading import FULL, LINEAR, read_decoder, read_layer_types
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import joined_convolution
from polyhead.families.common.tensors import Rule, Tensors, under

_EVERY, _BOUND = 4, -5.0
_INDEXED = "indexed_attention"


def read(keys: Keys) -> TransformerConfig:
    num_layers, positions = (
        keys.num_layers("num_hidden_layers"),
        keys.whole("max_position_embeddings"),
    )
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    full, state = _latents(keys, norm), _states(keys, norm)
    default = [LINEAR if (i + 1) % _EVERY else _INDEXED for i in range(num_layers)]
    kinds = read_layer_types(keys, num_layers, default, (LINEAR, _INDEXED, FULL))
    modes = deepseek.indexer_types(keys, num_layers)
    attentions: list[KimiDeltaAttentionConfig | SparseLatentAttentionConfig] = []
    for i, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
        if kind == LINEAR or mode == "full":
            attentions.append(state if kind == LINEAR else full)
        elif attentions and attentions[-1] == full:
            attentions.append(replace(full, selection_of=i - 1))
        else:
            wanted = f"'full' in layer {i}, which does not follow one that chooses"
            raise keys.refused("indexer_types", modes, wanted)
    limit = keys.positive("swiglu_limit")
    dense = FeedForwardConfig(keys.whole("intermediate_size"), "silu")
    networks = read_networks(keys, "sigmoid", dense, num_layers, listed=True)
    streams = MixedConnectionsConfig(
        keys.size("hc_mult"),
        eps=keys.number("hc_eps"),
        norm_eps=norm.eps,
        iterations=keys.size("hc_sinkhorn_iters"),
        at_end="mean",
    )
    layers = [
        LayerConfig(attention, _clamped(network, limit), norm, streams=streams)
        for attention, network in zip(attentions, networks, strict=True)
    ]
    return read_decoder(keys, layers, max_positions=positions, norm=norm)


def _latents(keys: Keys, norm: NormConfig) -> SparseLatentAttentionConfig:
    heads = keys.size("num_attention_heads")
    keys.expect("num_key_value_heads", heads, None)
    keys.expect("qk_rope_head_dim", 0)
    keys.take("head_dim", None)  # transformers puts the size of the rotated part there
    found = SparseLatentAttentionConfig(
        num_heads=heads,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=0,
        v_head_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank"),
        bias=keys.flag("attention_bias"),
        norm=norm,
        rope=None,
        dropout=keys.number("attention_dropout"),
        indexer=IndexerConfig(
            keys.size("index_n_heads"),
            keys.size("index_head_dim"),
            keys.size("index_topk"),
            pool=keys.size("index_kpool"),
        ),
    )
    keys.expect("qk_head_dim", found.qk_head_dim, None)
    keys.expect("index_kpool_always_select_tail", True)
    return found


def _states(keys: Keys, norm: NormConfig) -> KimiDeltaAttentionConfig:
    """Linear attention, whose sizes older files say in an object of their own."""
    values = keys.take("linear_attn_config", None) or {}
    if not isinstance(values, Mapping):
        raise keys.refused("linear_attn_config", values, "an object")
    stated = Keys(dict(values), f"{keys.where}: {keys.named('linear_attn_config')}")
    heads = stated.size("num_heads", keys.size("linear_num_heads"))
    size = stated.size("head_dim", keys.size("linear_head_dim"))
    kernel = stated.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim"))
    bound = keys.number("linear_lower_bound", None)
    if stated.has("gate_lower_bound"):
        bound = stated.number("gate_lower_bound", None)
    if stated.flag("safe_gate", True) and values and bound is None:
        bound = _BOUND
    if bound is not None and bound >= 0:
        raise keys.refused("linear_lower_bound", bound, "a number below 0, or null")
    stated.finish(("full_attn_layers", "kda_layers"))  # layer_types says which they are
    return KimiDeltaAttentionConfig(
        heads,
        heads,
        size,
        size,
        kernel,
        norm_eps=norm.eps,
        decay_bound=None if bound is None else -bound,
    )


def _clamped(
    network: FeedForwardConfig | MixtureConfig, limit: float
) -> FeedForwardConfig | MixtureConfig:
    if isinstance(network, FeedForwardConfig):
        return replace(network, clamp=limit)
    shared = network.shared
    return replace(
        network,
        expert=replace(network.expert, clamp=limit),
        shared=None if shared is None else replace(shared, clamp=limit),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [*config.layers]
    found, networks = [each.attention for each in layers], [each.feed_forward for each in layers]
    full = next((each for each in found if each.kind == "sparse_latent"), None)
    state = next((each for each in found if each.kind == "kimi_delta"), None)
    streams = layers[0].streams
    if not isinstance(streams, MixedConnectionsConfig) or full is None or state is None:
        raise ConfigError("this family has states, chosen latents and mixed streams")
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    bound, indexer = state.decay_bound, full.indexer
    values: dict[str, Any] = {
        **deepseek.write_attention(full),
        **write_dense_layers(config),
        "num_key_value_heads": full.num_heads,
        "linear_num_heads": state.num_heads,
        "linear_head_dim": state.head_k_dim,
        "linear_conv_kernel_dim": state.conv_kernel,
        "linear_lower_bound": None if bound is None else -bound,
        "layer_types": [LINEAR if each.kind == "kimi_delta" else _INDEXED for each in found],
        "indexer_types": ["shared" if each.reads else "full" for each in found],
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "index_kpool": indexer.pool,
        "hc_mult": streams.count,
        "hc_eps": streams.eps,
        "hc_sinkhorn_iters": streams.iterations,
    }
    if dense is not None:
        values |= {"intermediate_size": dense.hidden_dim, "swiglu_limit": dense.clamp}
    if mixture is not None:
        values |= {**write_mixture(mixture), "swiglu_limit": mixture.expert.clamp}
    return values


_LAYER = "layers.{i}."
_THEIRS, _OURS = _LAYER + "self_attn.", _LAYER + "attention."
_GATE = {"f_a_proj": "decay_a_proj", "f_b_proj": "decay_b_proj", "dt_bias": "dt_bias"}
_STREAMS = (("attn", "attention"), ("ffn", "feed_forward"))
_RULES = (
    *under(
        _THEIRS,
        _OURS,
        {
            **{name: name for name in ("k_proj", "v_proj")},
            "b_proj": "beta_proj",
            "g_a_proj": "gate_a_proj",
            "g_b_proj": "gate_b_proj",
            "o_norm": "norm",
            "indexer.index_kpool_compress_ape": "indexer.positions",
            "indexer.index_kpool_compress_gate": "indexer.gate_proj.weight",
        },
    ),
    *under(_THEIRS, _OURS, _GATE | {"A_log": "A_log"}),
    *under(_THEIRS + "forget_gate.", _OURS, _GATE | {"A_log": "A_log"}),
    joined_convolution(_THEIRS, _OURS),
    Rule(_THEIRS + "conv1d.weight", _OURS + "conv_weight", Shaped((1,))),
    *(
        Rule(f"{_LAYER}{written}{name}", f"{_LAYER}{ours}_streams.{leaf}")
        for theirs, ours in _STREAMS
        for written in (f"hc_{theirs}_", f"{theirs}_hc.")
        for name, leaf in (("fn", "weight"), ("base", "bias"), ("scale", "factors"))
    ),
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """DeepSeek's names and this family's own, with no rotary rows interleaved."""
    table = deepseek.tensors({**values, "rope_interleave": False}).extended(*_RULES)
    heads = r"layers\.\d+\.shared_head\..+"
    return replace(table, dropped={**table.dropped, **drafting(values), heads: "is of drafting"})


FAMILIES = (
    Family(
        "glm5_next_text",
        "Glm5Next",
        read,
        tensors,
        defaults={
            **kimi_linear.DEFAULTS,
            "vocab_size": 154_880,
            "num_key_value_heads": 64,
            "qk_nope_head_dim": 256,
            "qk_rope_head_dim": 0,
            "v_head_dim": 256,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 288,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "linear_num_heads": 64,
            "linear_lower_bound": _BOUND,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
            "index_kpool": 16,
            "index_kpool_always_select_tail": True,
            "hc_mult": 4,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "swiglu_limit": 10.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 154_820,
        },
        write=write,
        bare="TextModel",
        aliases={"n_routed_experts": "num_local_experts"},
        # Nothing is rotated; the rest is of training and drafting.
        harmless=frozenset(
            ("num_nextn_predict_layers", "rope_theta", "rope_parameters", "router_aux_loss_coef")
        ),
    ),
)
