"""LongCat-Flash (Meituan 2025, arXiv 2509.01322): its keys of config.json and order of tensors.

Each of the file's layers is two here, with DeepSeek-V3's latent attention and a dense network each.
The experts of a file's layer read what the first network reads, and what they give joins the stream
behind the second; some of them give back their input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.config import IdentityMixtureConfig, LayerConfig, MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import DRAFTS
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm
from polyhead.families.common.rope import reach
from polyhead.families.common.steps import At, PerExpert, Rows
from polyhead.families.common.tables import AROUND_LAYERS
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.deepseek import latent_attention, read_attention, write_attention


def read(keys: Keys) -> TransformerConfig:
    count, embed_dim = _bounded(keys, "num_layers"), keys.size("hidden_size")
    keys.expect("num_hidden_layers", 2 * count)
    for key, only in _ASSUMED.items():
        keys.expect(key, only)
    positions, norm = keys.whole("max_position_embeddings"), read_rms_norm(keys)
    plain, network = read_attention(keys, positions, theta=_THETA), read_network(keys)
    attention = replace(
        plain,
        scale=plain.score_scale * math.sqrt(embed_dim / keys.size("q_lora_rank")),
        latent_scale=math.sqrt(embed_dim / plain.kv_lora_rank),
    )
    options: dict[str, Any] = {
        "expert": replace(network, hidden_dim=keys.size("expert_ffn_hidden_size")),
        "num_experts": keys.size("n_routed_experts"),
        "experts_per_token": keys.size("moe_topk"),
        "choice_bias": True,
        "scale": keys.number("routed_scaling_factor"),
    }
    mixture = MixtureConfig(**options)
    if identities := _bounded(keys, "zero_expert_num", least=0):
        mixture = IdentityMixtureConfig(**options, identities=identities)
    layer = LayerConfig(attention, network, norm)
    pair = replace(layer, shortcut=mixture), replace(layer, joins_shortcut=True)
    return read_decoder(
        keys,
        pair * count,
        max_positions=positions if plain.rope is None else reach(plain.rope, positions),
        norm=norm,
    )


def _bounded(keys: Keys, key: str, least: int = 1) -> int:
    """A number of which the table of names has a line for each."""
    if not least <= (count := keys.whole(key)) <= _MOST:
        raise keys.refused(key, count, f"{least} to {_MOST}")
    return count


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].shortcut
    if not isinstance(mixture, MixtureConfig):
        raise ConfigError("in this family every other layer has a shortcut with experts")
    return {
        **write_attention(config.layers[0].attention),
        "num_layers": len(config.layers) // 2,
        "expert_ffn_hidden_size": mixture.expert.hidden_dim,
        "n_routed_experts": mixture.num_experts,
        "moe_topk": mixture.experts_per_token,
        "routed_scaling_factor": mixture.scale,
        "zero_expert_num": mixture.choices - mixture.num_experts,
    }


@dataclass(frozen=True)
class PaddedExperts(PerExpert):
    """``PerExpert`` where the file has matrices, which nothing reads, for identities too."""

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return super().to_ours(tensor[: at.experts], at)

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        mixture: Any = at.layer.shortcut
        unread = [torch.zeros_like(tensors[0])] * (mixture.choices - mixture.num_experts)
        return super().to_theirs([*tensors, *unread], at)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; a file's layer ``i`` is the layers ``2 i`` and ``2 i + 1`` here."""
    rules: list[Rule] = [*AROUND_LAYERS]
    values = {**DEFAULTS, **values}
    for i in range(values["num_layers"]):
        rules += _experts(f"layers.{i}.mlp.", f"layers.{2 * i}.shortcut.")
        for half in (0, 1):
            theirs, ours = f"layers.{i}.", f"layers.{2 * i + half}."
            rules += latent_attention(f"{theirs}self_attn.{half}.", f"{ours}attention.")
            rules += under(
                theirs,
                ours,
                {
                    f"input_layernorm.{half}": "attention_norm",
                    f"post_attention_layernorm.{half}": "feed_forward_norm",
                    **{f"mlps.{half}.{name}": f"feed_forward.{name}" for name in _PROJECTIONS},
                },
            )
    first, more = values["n_routed_experts"], values["zero_expert_num"]
    unread = "|".join(str(first + j) for j in range(more))
    dropped = {rf"layers\.\d+\.mlp\.experts\.({unread})\.(gate|up)_proj\.weight": _UNREAD}
    return Tensors(tuple(rules), dropped={r"mtp\..+": DRAFTS, **(dropped if unread else {})})


def _experts(theirs: str, ours: str) -> tuple[Rule, ...]:
    expert = ours + "experts.{j}."
    both = expert + "gate_proj.weight", expert + "up_proj.weight"
    return (
        Rule(theirs + "experts.gate_up_proj", both, PaddedExperts(), Rows()),
        Rule(theirs + "experts.down_proj", expert + "down_proj.weight", PerExpert()),
        Rule(theirs + "router.classifier", ours + "router"),
        Rule(theirs + "router.e_score_correction_bias", ours + "choice_bias"),
        *under(theirs + "experts.{j}.", expert, {name: name for name in _PROJECTIONS}),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_UNREAD = "an expert that gives back its input has no weights"
_MOST, _THETA = 2000, 10_000_000.0
# Keys of the published files; transformers computes them so and in no other way.
_ASSUMED = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "norm_topk_prob": False,
    "router_bias": False,
    "zero_expert_type": "identity",
}
DEFAULTS: Mapping[str, Any] = {
    "num_layers": 28,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "expert_ffn_hidden_size": 2048,
    "routed_scaling_factor": 6.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = (
    Family(
        "longcat_flash",
        "LongcatFlash",
        read,
        tensors,
        defaults=DEFAULTS,
        write=write,
        aliases={"intermediate_size": "ffn_hidden_size"},
    ),
)
