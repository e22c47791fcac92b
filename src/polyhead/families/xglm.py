"""XGLM (Lin et al. 2022): sinusoidal positions."""

from __future__ import annotations

from polyhead.config import EmbeddingConfig, SinusoidConfig, TransformerConfig
from polyhead.families.biogpt import AROUND_LAYERS, read_fairseq, write
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Tensors
from polyhead.families.opt import LAYERS, OFFSET


def read(keys: Keys) -> TransformerConfig:
    embedding = EmbeddingConfig(
        positions="sinusoidal", sinusoid=SinusoidConfig("halves", spread=True)
    )
    config = read_fairseq(keys, embedding, "attention_dropout")
    if config.pad_token_id is not None and config.pad_token_id >= OFFSET:
        raise keys.refused(
            "pad_token_id",
            config.pad_token_id,
            f"below {OFFSET}: the class clears that row of the table of positions",
        )
    return config


FAMILIES = (
    Family(
        "xglm",
        "XGLM",
        read,
        Tensors((*AROUND_LAYERS, *LAYERS), dropped={r"embed_positions\.weights": "the sinusoids"}),
        initial_key="init_std",
        defaults={
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.0,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        write=write,
        aliases={
            "hidden_size": "d_model",
            "intermediate_size": "ffn_dim",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "hidden_act": "activation_function",
            "hidden_dropout_prob": "dropout",
        },
        not_supported={"add_cross_attention": "only the decoder alone is built"},
        harmless=frozenset(("layerdrop", "init_std")),
    ),
)
