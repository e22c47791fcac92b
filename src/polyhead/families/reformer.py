"""Reformer (Kitaev et al. 2020): chunks sorted by hashes, reversible layers, axial positions.

With layers that hash a model reads whole texts and has no cache: where their chunks end depends on
all tokens, so that transformers' own cache gives other logits than one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyhead.config import (
    AttentionConfig,
    AxialConfig,
    EmbeddingConfig,
    LayerConfig,
    LshAttentionConfig,
    NormConfig,
    ReversibleConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tensors import Rule, Tensors, under

_LOCAL, _LSH = "local", "lsh"


def read(keys: Keys) -> TransformerConfig:
    if not keys.flag("is_decoder"):
        raise keys.refused("is_decoder", False, "true: only the decoder is built")
    kinds = keys.texts("attn_layers")
    if not kinds or not {*kinds} <= {_LOCAL, _LSH}:
        raise keys.refused("attn_layers", kinds, "a list of 'local' and 'lsh'")
    keys.expect("num_hidden_layers", len(kinds))
    heads, head_dim = keys.size("num_attention_heads"), keys.size("attention_head_size")
    local = AttentionConfig(
        heads,
        heads,
        head_dim,
        chunk=keys.size("local_attn_chunk_length"),
        chunks_before=keys.whole("local_num_chunks_before"),
        dropout=keys.number("local_attention_probs_dropout_prob"),
    )
    found = _read_hashes(keys)
    of_kind: dict[str, AttentionConfig] = {_LOCAL: local}
    if _LSH in kinds:
        beside = local.chunk if _LOCAL in kinds else None
        of_kind[_LSH] = LshAttentionConfig(heads, heads, head_dim, local_chunk=beside, **found())
    network = read_network(keys, gated=False, bias=True)
    norm = NormConfig("layernorm", eps=keys.positive("layer_norm_eps"), bias=True)
    dropout, streams = keys.number("hidden_dropout_prob"), ReversibleConfig()
    embedding, positions = _read_positions(keys, dropout)
    return read_decoder(
        keys,
        [LayerConfig(of_kind[k], network, norm, dropout=dropout, streams=streams) for k in kinds],
        max_positions=positions,
        norm=norm,
        embedding=embedding,
    )


def _read_hashes(keys: Keys) -> Callable[[], dict[str, Any]]:
    """Takes the keys of layers that hash; what is made of them is asked for where there are any."""
    for kind in (_LOCAL, _LSH):
        keys.expect(f"{kind}_num_chunks_after", 0)
    fields: dict[str, Any] = {
        "chunk_length": keys.size("lsh_attn_chunk_length"),
        "look_back": keys.whole("lsh_num_chunks_before"),
        "num_hashes": keys.size("num_hashes"),
        "hash_seed": keys.whole("hash_seed", None),
        "dropout": keys.number("lsh_attention_probs_dropout_prob"),
    }
    buckets = keys.take("num_buckets")
    sizes = [buckets] if type(buckets) is int else buckets

    def made() -> dict[str, Any]:
        whole = isinstance(sizes, list) and all(type(each) is int for each in sizes)
        if not whole or not sizes:
            raise keys.refused(
                "num_buckets",
                buckets,
                "a number or a list of factors: without it transformers takes one from the length "
                "of the first text that a layer reads, and keeps it",
            )
        if fields["hash_seed"] is None:
            raise keys.refused(
                "hash_seed",
                None,
                "a whole number: without it transformers draws other hashes in every call",
            )
        return fields | {"num_buckets": tuple(sizes)}

    return made


def _read_positions(keys: Keys, dropout: float) -> tuple[EmbeddingConfig, int]:
    """The embedding, and how many positions there are."""
    count = keys.whole("max_position_embeddings")
    shape, dims = keys.wholes("axial_pos_shape"), keys.wholes("axial_pos_embds_dim")
    if not keys.flag("axial_pos_embds"):
        return EmbeddingConfig("learned", dropout=dropout), count
    for key, value in (("axial_pos_shape", shape), ("axial_pos_embds_dim", dims)):
        if len(value) != 2:
            raise keys.refused(key, value, "2 numbers")
    axial = AxialConfig((shape[0], shape[1]), (dims[0], dims[1]))
    embedding = EmbeddingConfig("axial", axial=axial, dropout=dropout)
    return embedding, min(count, shape[0] * shape[1])


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    if not all(isinstance(layer.streams, ReversibleConfig) for layer in config.layers):
        raise ConfigError("this family needs reversible layers")
    values: dict[str, Any] = {
        "is_decoder": True,
        "attn_layers": [_LSH if each.kind == "lsh" else _LOCAL for each in attentions],
        "attention_head_size": attentions[0].head_dim,
        "axial_pos_embds": config.embedding.axial is not None,
    }
    if (axial := config.embedding.axial) is not None:
        values |= {"axial_pos_shape": [*axial.shape], "axial_pos_embds_dim": [*axial.dims]}
    for each in attentions:
        if each.kind == "lsh":
            values |= {
                "lsh_attn_chunk_length": each.chunk_length,
                "lsh_num_chunks_before": each.look_back,
                "num_hashes": each.num_hashes,
                "hash_seed": each.hash_seed,
                "num_buckets": [*each.num_buckets],
                "lsh_attention_probs_dropout_prob": each.dropout,
            }
        else:
            values |= {
                "local_attn_chunk_length": each.chunk,
                "local_num_chunks_before": each.chunks_before,
                "local_attention_probs_dropout_prob": each.dropout,
            }
    return values


def _tensors(values: Mapping[str, Any]) -> Tensors:
    learned = (Rule(_POSITIONS + "embedding", "embedding.positions"),)
    axial = tuple(
        Rule(f"{_POSITIONS}weights.{i}", f"embedding.positions.{name}", Shaped((1 - i,)))
        for i, name in enumerate(("rows", "columns"))
    )
    own = [
        rule.at(str(i))
        for i, kind in enumerate(values["attn_layers"])
        for rule in under(
            _LAYER + "attention.self_attention.",
            "layers.{i}.attention.",
            {_LSH: {"query_key": "q_proj"}}.get(kind, {"query": "q_proj", "key": "k_proj"}),
        )
    ]
    return Tensors(
        (
            Rule("embeddings.word_embeddings", "embedding.tokens"),
            *(axial if values.get("axial_pos_embds", True) else learned),
            Rule("encoder.layer_norm", "final_norm"),
            *own,
            *under(
                _LAYER,
                "layers.{i}.",
                {
                    "attention.layer_norm": "attention_norm",
                    "attention.self_attention.value": "attention.v_proj",
                    "attention.output.dense": "attention.o_proj",
                    "feed_forward.layer_norm": "feed_forward_norm",
                    "feed_forward.dense.dense": "feed_forward.up_proj",
                    "feed_forward.output.dense": "feed_forward.down_proj",
                },
            ),
        ),
        prefix="reformer.",
        outside=(Rule("lm_head.decoder", "head"),),
        dropped={r"lm_head\.bias": "transformers' head does not add it"},
    )


_LAYER, _POSITIONS = "encoder.layers.{i}.", "embeddings.position_embeddings."
_DEFAULTS: dict[str, Any] = {
    "attention_head_size": 64,
    "axial_pos_embds": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "feed_forward_size": 512,
    "hash_seed": None,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.05,
    "hidden_size": 256,
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "local_attention_probs_dropout_prob": 0.05,
    "local_attn_chunk_length": 64,
    "local_num_chunks_after": 0,
    "local_num_chunks_before": 1,
    "lsh_attention_probs_dropout_prob": 0.0,
    "lsh_attn_chunk_length": 64,
    "lsh_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_buckets": None,
    "num_hashes": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES = (
    Family(
        "reformer",
        "Reformer",
        read,
        _tensors,
        defaults=_DEFAULTS,
        write=write,
        aliases={"intermediate_size": "feed_forward_size"},
        with_head="ModelWithLMHead",
        harmless=frozenset(("axial_norm_std", "chunk_size_lm_head")),
    ),
)
