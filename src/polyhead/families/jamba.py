"""Jamba (AI21, 2024, arXiv 2403.19887): Mamba, attention without positions in some layers, experts
in some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.config import LayerConfig, MambaConfig, MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.bamba import AROUND_MIXERS, of_attention
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS as GGUF_EXPERTS
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_states import (
    KV_HEADS,
    attends,
    divided,
    kv_heads,
    kv_heads_of,
    mamba_steps,
)
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.tables import ATTENTION
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.lfm2 import STACKED_EXPERTS
from polyhead.families.mamba import MAMBA_SETTINGS, inner_size, mamba_rules, read_mamba, write_mamba

MIXER_NAMES = {
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
_PERIODS = {"attn_layer_period": 8, "attn_layer_offset": 4}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, dense = read_sizes(keys), read_rms_norm(keys), read_network(keys)
    state = read_mamba(keys, keys.size("expand") * sizes.embed_dim, norm)
    full = sizes.attention(dropout=keys.number("attention_dropout"))
    experts, visited = keys.whole("num_experts"), keys.whole("num_experts_per_tok")
    mixture = dense if experts == 1 else MixtureConfig(dense, experts, visited)
    attends, sparse = (_chosen(keys, part) for part in ("attn", "expert"))
    layers = [
        LayerConfig(
            full if i % attends[0] == attends[1] else state,
            mixture if i % sparse[0] == sparse[1] else dense,
            norm,
        )
        for i in range(sizes.num_layers)
    ]
    return read_decoder(keys, layers, max_positions=sizes.max_positions, norm=norm)


def _chosen(keys: Keys, part: str) -> tuple[int, int]:
    """Of so many layers the one with this number has the part."""
    period, offset = keys.size(f"{part}_layer_period"), keys.whole(f"{part}_layer_offset")
    if not 0 <= offset < period:
        raise keys.refused(f"{part}_layer_offset", offset, f"0 to {period - 1}, below the period")
    return period, offset


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    state = next((each for each in found if isinstance(each, MambaConfig)), None)
    if state is None or None in networks:
        raise ConfigError("this family needs a layer of Mamba, and networks in all layers")
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    mixer = write_mamba(state, config.embed_dim)
    return {
        **{MIXER_NAMES[key]: value for key, value in mixer.items()},
        **_period("attn", [each.kind == "heads" for each in found]),
        **_period("expert", [each is not None and each == mixture for each in networks]),
        "num_experts": 1 if mixture is None else mixture.num_experts,
        "intermediate_size": getattr(networks[0], "expert", networks[0]).hidden_dim,
    }


def _period(part: str, has: Sequence[bool]) -> dict[str, int]:
    """The least period by which these layers have the part."""
    for period in range(1, len(has) + 2):
        for offset in range(period):
            if all(there == (i % period == offset) for i, there in enumerate(has)):
                return {f"{part}_layer_period": period, f"{part}_layer_offset": offset}
    raise ConfigError(f"this family has its {part} layers at equal distances: got {[*has]}")


_NETWORK = "layers.{i}.feed_forward."
_EXPERT = _NETWORK + "experts.{j}."
TENSORS = Tensors(
    (
        *AROUND_MIXERS,
        *mamba_rules("layers.{i}.mamba.", "layers.{i}.attention."),
        *ATTENTION,
        Rule(_NETWORK + "router", _NETWORK + "router"),
        *under(_EXPERT, _EXPERT, {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
        *STACKED_EXPERTS,
    )
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """An output projection's name depends on what the layer is."""
    period, offset = (values.get(key, default) for key, default in _PERIODS.items())
    layers = range(values["num_hidden_layers"])
    return TENSORS.extended(*of_attention(i for i in layers if i % period == offset))


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    names = values[".tensors"]
    layers = range(values["num_hidden_layers"])
    return {
        **kv_heads(values),
        "expand": divided(values, "hidden_size", "embedding_length"),
        **_period("attn", attends(values)),
        **_period("expert", [f"blk.{i}.ffn_gate_inp.weight" in names for i in layers]),
        "num_experts": values.get("num_experts", 1),
    }


FAMILIES = (
    Family(
        "jamba",
        "Jamba",
        read,
        tensors,
        defaults={
            **_PERIODS,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "vocab_size": 65_536,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "expand": 2,
            "state_size": 16,
            "time_step_rank": "auto",
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        aliases=MIXER_NAMES,
        write=write,
        gguf=Gguf(
            "jamba",
            settings={**MAMBA_SETTINGS, **KV_HEADS},
            steps=mamba_steps("layers.{i}.mamba."),
            rules=GGUF_EXPERTS,
            values=_from_gguf,
            settings_of=lambda config: {**inner_size(config), **kv_heads_of(config)},
        ),
        harmless=frozenset(
            (
                "num_logits_to_keep",
                "router_aux_loss_coef",
                "use_associative_scan",
                "use_mamba_kernels",
                "use_mambapy",
            )
        ),
    ),
)
