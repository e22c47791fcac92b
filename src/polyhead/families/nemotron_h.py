"""Nemotron-H and Nemotron 3 (NVIDIA, 2025, arXiv 2504.03624): Mamba-2, attention without positions,
and networks of relu² or experts of it.

A file's layers are parts of ours: one norm with a mixer, an attention or a network. A network and
what stands before it are one layer here; a mixer that none follows is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mamba2 import DEFAULTS, mamba2_rules, read_mamba2, write_mamba2
from polyhead.families.common.mixtures import DRAFTS, drafting
from polyhead.families.common.reading import FULL, LINEAR, read_activation, read_decoder
from polyhead.families.common.steps import PerExpert
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.nemotron_h_gguf import DENSE, DENSE_GGUF, SPARSE, SPARSE_GGUF

_LETTERS = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
_OLDER = {"mamba": LINEAR, "attention": FULL}
_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "hidden_act": "mamba_hidden_act",
}
_BLOCKS, _PATTERN = "layers_block_type", "hybrid_override_pattern"


def read(keys: Keys) -> TransformerConfig:
    norm = NormConfig("rmsnorm", eps=keys.number("layer_norm_epsilon"))
    width = keys.size("mamba_n_heads") * keys.size("mamba_d_head")
    options = {"dt_min": keys.number("time_step_min"), "dt_max": None}
    options["bias"] = keys.flag("use_bias")
    state = read_mamba2(keys, keys.size("hidden_size"), norm.eps, width, **options)
    heads, kv_heads = keys.size("num_attention_heads"), keys.size("num_key_value_heads")
    full = AttentionConfig(
        heads, kv_heads, keys.size("head_dim"), dropout=keys.number("attention_dropout")
    )
    keys.expect("tie_word_embeddings", False)  # transformers' class ties nothing
    keys.expect("attention_head_dim", full.head_dim, None)
    keys.flag("residual_in_fp32")  # the stream has the dtype of weights, which here is no less
    activation, bias = read_activation(keys, "mlp_hidden_act"), keys.flag("mlp_bias")
    dense = FeedForwardConfig(keys.size("intermediate_size"), activation, gated=False, bias=bias)
    parts: dict[str, Any] = {LINEAR: state, FULL: full, DENSE: dense}
    parts[SPARSE] = _read_mixture(keys, dense)
    blocks = _blocks({key: keys.take(key, None) for key in (_BLOCKS, _PATTERN)})
    keys.take("num_hidden_layers", None)  # follows from the blocks
    if not {*blocks} <= {*parts}:
        raise keys.refused(_BLOCKS, blocks, ", ".join(parts))
    layers = []
    for mixer, network in _paired(blocks):
        if mixer not in (LINEAR, FULL):
            raise keys.refused(_BLOCKS, blocks, f"a mixer or attention before each {mixer}")
        layers.append(LayerConfig(parts[mixer], parts.get(network or ""), norm))
    reached = keys.whole("max_position_embeddings")
    return read_decoder(keys, layers, max_positions=reached, norm=norm)


def _read_mixture(keys: Keys, dense: FeedForwardConfig) -> MixtureConfig:
    def network(key: str, bias: bool) -> FeedForwardConfig:
        return FeedForwardConfig(keys.size(key), dense.activation, gated=False, bias=bias)

    return MixtureConfig(
        network("moe_intermediate_size", False),
        keys.whole("n_routed_experts"),
        keys.whole("num_experts_per_tok"),
        shared=network("moe_shared_expert_intermediate_size", dense.bias),
        scoring="sigmoid",
        choice_bias=True,
        normalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"),
        groups=keys.whole("n_group"),
        groups_per_token=keys.whole("topk_group"),
        group_score="best two",
    )


def _blocks(values: Mapping[str, Any]) -> list[str]:
    """What each of the file's layers is."""
    blocks, pattern = values.get(_BLOCKS), values.get(_PATTERN)
    if blocks is None and isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    if blocks is None:
        return [LINEAR, SPARSE, FULL, DENSE]
    if not isinstance(blocks, list) or not blocks:
        raise ConfigError(f"{_BLOCKS} must be a list of kinds of layers: got {blocks!r:.80}")
    return [_OLDER.get(str(each), str(each)) for each in blocks]


def _paired(blocks: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """A mixer and the network behind it, or None."""
    at = 0
    while at < len(blocks):
        follows = blocks[at + 1] if at + 1 < len(blocks) else None
        network = follows if follows in (DENSE, SPARSE) else None
        yield blocks[at], network
        at += 1 if network is None else 2


def write(config: TransformerConfig) -> dict[str, Any]:
    def found(kind: str, name: str = "attention") -> Any:
        parts: list[Any] = [getattr(layer, name) for layer in config.layers]
        return next((each for each in parts if each is not None and each.kind == kind), None)

    state, full = found("mamba2"), found("heads")
    dense, mixture = found("plain", "feed_forward"), found("mixture", "feed_forward")
    if state is None:
        raise ConfigError("this family needs a layer of Mamba-2: got none")
    kinds = {"mamba2": LINEAR, "heads": FULL, "plain": DENSE, "mixture": SPARSE}
    parts = [part for layer in config.layers for part in (layer.attention, layer.feed_forward)]
    values = {
        "layer_norm_epsilon": config.layers[0].norm.eps,
        _BLOCKS: [kinds.get(each.kind, each.kind) for each in parts if each is not None],
        "time_step_min": state.dt_min,
        **write_mamba2(state, config.embed_dim, {**_NAMES, "mamba_proj_bias": "use_bias"}),
        "expand": 2,
        "mamba_hidden_act": "silu",
    }
    values.pop("time_step_limit", None)
    if full is not None:
        values["head_dim"] = full.head_dim
    network = dense or (None if mixture is None else mixture.shared)
    if network is not None:
        values |= {"mlp_hidden_act": network.activation, "mlp_bias": network.bias}
    if dense is not None:
        values["intermediate_size"] = dense.hidden_dim
    if mixture is None:
        return values
    return values | {
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "moe_shared_expert_intermediate_size": mixture.shared.hidden_dim,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalize,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; the file's numbers of layers are not ours."""
    rules: list[Rule] = []
    at, projections = 0, ("up_proj", "down_proj")
    for i, (mixer, network) in enumerate(_paired(_blocks(values))):
        theirs, ours = f"layers.{at}.mixer.", f"layers.{i}.attention."
        rules.append(Rule(f"layers.{at}.norm", f"layers.{i}.attention_norm"))
        if mixer == LINEAR:
            rules += mamba2_rules(theirs, ours)
            named = {name: name for name in ("A_log", "D", "dt_bias")}
            rules += under(theirs + "_fp32_params.", ours, named)  # in Nemotron 3.5 Transcribe
        else:
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            rules += under(theirs, ours, {name: name for name in names})
        at += 1
        if network is None:
            continue
        theirs, ours = f"layers.{at}.mixer.", f"layers.{i}.feed_forward."
        rules.append(Rule(f"layers.{at}.norm", f"layers.{i}.feed_forward_norm"))
        same = {name: name for name in projections}
        if network == DENSE:
            rules += under(theirs, ours, same)
        else:
            experts = "experts.{j}."
            rules += under(theirs + experts, ours + experts, same)
            rules += under(theirs + "shared_experts.", ours + "shared.", same)
            rules.append(Rule(theirs + "gate", ours + "router"))
            rules.append(Rule(theirs + "gate.e_score_correction_bias", ours + "choice_bias"))
            rules += [
                Rule(f"{theirs}experts.{name}", f"{ours}{experts}{name}.weight", PerExpert())
                for name in projections
            ]
        at += 1
    return Tensors(
        (Rule("embeddings", "embedding.tokens"), Rule("norm_f", "final_norm"), *rules),
        prefix="backbone.",
        dropped={r"mtp\..+": DRAFTS, **drafting({**values, "num_hidden_layers": at})},
    )


FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronH",
        read,
        tensors,
        defaults={
            **{key: value for key, value in DEFAULTS.items() if key[:6] == "mamba_"},
            "use_bias": False,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "hidden_act": "silu",
            "time_step_min": 0.001,
            "vocab_size": 131_072,
            "layers_block_type": None,
            "layer_norm_epsilon": 1e-5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_dropout": 0.0,
            "max_position_embeddings": 4096,
            "intermediate_size": 21_504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "residual_in_fp32": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        aliases=_NAMES,
        not_supported={
            "attention_bias": "transformers' layers have no such biases",
            "moe_latent_size": "experts that read fewer features than the stream has",
            "sliding_window": "transformers' layers do not use it",
        },
        write=write,
        gguf=DENSE_GGUF,
        more_gguf=(SPARSE_GGUF,),
        harmless=frozenset(
            (
                "chunk_size",
                "hidden_dropout",
                "mamba_ssm_cache_dtype",
                "mamba_proj_bias",
                "moe_shared_expert_overlap",
                "mtp_layers_block_type",
                "mtp_hybrid_override_pattern",
                "n_shared_experts",
                "num_logits_to_keep",
                "num_nextn_predict_layers",
                "rescale_prenorm_residual",
                "time_step_floor",
                "time_step_limit",
                "time_step_max",
                "use_mamba_kernels",
            )
        ),
    ),
)
