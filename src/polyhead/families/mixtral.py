"""Mixtral (Jiang et al. 2024): Mistral whose networks are mixtures of experts."""

from __future__ import annotations

from typing import Any

from polyhead.config import LayerConfig, MixtureConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERT_BY_EXPERT, EXPERTS, PAIRS, Gguf, has_experts
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, FREQUENCIES, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under

_MIXTURE = "layers.{i}.feed_forward."
W123 = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
BLOCK_SPARSE = (
    Rule("layers.{i}.block_sparse_moe.gate", _MIXTURE + "router"),
    *under(
        "layers.{i}.block_sparse_moe.experts.{j}.",
        _MIXTURE + "experts.{j}.",
        W123,
    ),
)
"""Mixtral's names of a mixture."""


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=1e6)
    attention = sizes.attention(
        rope=rope,
        window=keys.whole("sliding_window", None),
        dropout=keys.number("attention_dropout"),
    )
    mixture = MixtureConfig(
        read_network(keys),
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        normalize=True,
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, mixture, norm)] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    return {"num_local_experts": mixture.num_experts}


FAMILIES = (
    Family(
        "mixtral",
        "Mixtral",
        read,
        Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *BLOCK_SPARSE), dropped=FREQUENCIES),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "head_dim": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef", "router_jitter_noise")),
        gguf=Gguf(
            "llama",
            settings={"expert_count": "num_local_experts"},
            steps=PAIRS,
            rules=(*EXPERTS, *EXPERT_BY_EXPERT),
            fits=has_experts,
        ),
    ),
)
