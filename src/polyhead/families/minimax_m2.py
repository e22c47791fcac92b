"""MiniMax-M2 (2025): a mixture in every layer, queries and keys normalized over all heads."""

from __future__ import annotations

from polyhead.config import LayerConfig, MixtureConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS, SIGMOID, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NORMS
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.mixtral import BLOCK_SPARSE, write


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rotated = keys.whole("rotary_dim", None)  # how the published files say partial_rotary_factor
    rope = read_rope(
        keys,
        sizes.head_dim,
        sizes.max_positions,
        theta=5e6,
        partial_rotary_factor=1.0 if rotated is None else rotated / sizes.head_dim,
    )
    attention = sizes.attention(
        rope=rope,
        qk_norm=QKNormConfig(norm, place="full_width"),
        dropout=keys.number("attention_dropout"),
    )
    mixture = MixtureConfig(
        read_network(keys),
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
    )
    return read_decoder(
        keys,
        [LayerConfig(attention, mixture, norm)] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


_CHOICE_BIAS = "layers.{i}.block_sparse_moe.e_score_correction_bias"

FAMILIES = (
    Family(
        "minimax_m2",
        "MiniMaxM2",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *ATTENTION,
                *BLOCK_SPARSE,
                Rule(_CHOICE_BIAS, "layers.{i}.feed_forward.choice_bias"),
            )
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef", "router_jitter_noise")),
        gguf=Gguf(
            "minimax-m2",
            settings={
                "expert_count": "num_local_experts",
                "expert_feed_forward_length": "intermediate_size",
            },
            constants=SIGMOID,
            names={_CHOICE_BIAS: "blk.{i}.exp_probs_b.bias"},
            rules=EXPERTS,
        ),
    ),
)
