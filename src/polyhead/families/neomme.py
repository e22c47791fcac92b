"""NeoMME (H Company 2026): an encoder of exclusive heads, whose attention also reads the embedding.

Most layers have windows, by turns narrow and wide. The first and the last without one add vectors
of the ids to their values. Read as it reads a text: pictures enter in place of some ids, which is
not built. Of a text the two coordinates of a position are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    ExclusiveAttentionConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_layer_types,
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import read_ropes, write_ropes
from polyhead.families.common.steps import Transposed
from polyhead.families.common.tables import ATTENTION, NETWORK
from polyhead.families.common.tasks import (
    ANSWERS,
    MASKED,
    PRE_TRAINING,
    SEQUENCE,
    TOKENS,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors

_ROPES = {FULL: RopeConfig(1e6), SLIDING: RopeConfig(1e4)}
_PARTS = {FULL: 0.25, SLIDING: 1.0}
_WIDE = 1024


def read(keys: Keys) -> TransformerConfig:
    sizes, vocab_size = read_sizes(keys), keys.size("vocab_size")
    norm = NormConfig("rmsnorm", eps=keys.number("norm_eps"), weight=False)
    types = read_layer_types(keys, sizes.num_layers, _default_types(sizes.num_layers))
    if FULL not in types:
        raise keys.refused("layer_types", types, f"at least one {FULL}")
    keys.expect("hidden_act", "relu2")
    biased, rank = keys.flag("attention_bias"), keys.size("embedding_rank")
    scale = keys.number("residual_multiplier", None)
    if scale is not None and scale <= 0:
        raise keys.refused("residual_multiplier", scale, "a number above 0")
    attention = sizes.attention(
        ExclusiveAttentionConfig,
        qkv_bias=biased,
        out_bias=biased,
        gate_bias=False,
        qk_norm=QKNormConfig(norm),
        dropout=keys.number("attention_dropout"),
        mix_norm=norm,
    )
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    windows = _read_windows(keys, types)
    ropes = _read_ropes(keys, sizes.head_dim, sizes.max_positions)
    first, last = _with_vectors(types)

    def layer(i: int) -> LayerConfig:
        own: dict[str, Any] = {"rope": ropes[types[i]]}
        if (window := windows[i]) is not None:
            own |= {"window": window + 1, "window_ahead": window}
        if i in (first, last):
            own |= {"value_vocab_size": vocab_size, "value_table_of": None if i == first else first}
        return LayerConfig(
            replace(attention, **own),
            network,
            norm,
            attention_norm=False,
            residual_scale=(2 * sizes.num_layers) ** -0.5 if scale is None else scale,
        )

    tied = keys.flag("tie_word_embeddings")
    return read_encoder(
        keys,
        tuple(map(layer, range(sizes.num_layers))),
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            norm=norm, projection=EmbeddingProjectionConfig(rank, "tokens", bias=False)
        ),
        final_norm=norm,
        **read_head(
            keys,
            HeadTransformConfig(rank, bias=False, tied=tied),
            head_bias=False,
            without=(PRE_TRAINING, SEQUENCE, TOKENS, ANSWERS),
        ),
    )


def _default_types(num_layers: int) -> list[str]:
    """Every sixth layer and the last see everything."""
    full = {*range(5, num_layers, 6), num_layers - 1}
    return [FULL if i in full else SLIDING for i in range(num_layers)]


def _with_vectors(types: list[str]) -> tuple[int, int]:
    """The layers whose values have vectors of the ids."""
    full = [i for i, kind in enumerate(types) if kind == FULL]
    return full[0], full[-1]


def _read_windows(keys: Keys, types: list[str]) -> list[int | None]:
    """Keys that each layer's window has on either side; None: it has no window."""
    plain, stated = keys.size("sliding_window", None), keys.take("per_layer_config", None)
    narrow = [i for i, kind in enumerate(types) if kind == SLIDING]
    if stated is None:
        wide = narrow[1::2]
        found = [_WIDE if i in wide else plain if i in narrow else None for i in range(len(types))]
    else:
        names = {str(i): i for i in range(len(types))}
        if not isinstance(stated, Mapping) or not {str(name) for name in stated} <= names.keys():
            raise keys.refused("per_layer_config", stated, "an object of layers' numbers")
        found = [plain] * len(types)
        for name, changed in stated.items():
            inner = Keys(changed, f"{keys.where}: per_layer_config.{name}")
            found[names[str(name)]] = inner.size("sliding_window", None)
            inner.finish()
    if [i for i, window in enumerate(found) if window is not None] != narrow:
        wanted = f"a sliding_window in layers of {SLIDING}, and null in others"
        raise keys.refused("per_layer_config", stated, wanted)
    return found


def _read_ropes(keys: Keys, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer, which rotates a part of a head in each."""
    values = keys.take("rope_parameters", None) or {}
    if not isinstance(values, Mapping) or values.keys() - _ROPES.keys():
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(_ROPES)}")
    ropes: dict[str, RopeConfig] = {}
    for kind, rope in _ROPES.items():
        one = Keys({"rope_parameters": {kind: values.get(kind)}}, keys.where)
        given = {kind: rope.theta}
        ropes |= read_ropes(one, head_dim, max_positions, given, partial_rotary_factor=_PARTS[kind])
        turned = head_dim if ropes[kind].dim is None else ropes[kind].dim
        if not turned or turned % 4:
            wanted = f"a multiple of 4 features of head_dim={head_dim}, for two coordinates"
            raise keys.refused(f"rope_parameters.{kind}", values.get(kind), wanted)
    return ropes


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    network: Any = config.layers[0].feed_forward
    head_dim, windows = layers[0].head_dim, [each.window_ahead for each in layers]
    types = [FULL if window is None else SLIDING for window in windows]
    plain = next((window for window in windows if window is not None), DEFAULTS["sliding_window"])
    projection, norm = config.embedding.projection, config.final_norm
    if projection is None or norm is None:
        raise AttributeError("NeoMME projects its embedding, and has a last norm")
    unused = {
        kind: rope if _PARTS[kind] == 1.0 else replace(rope, dim=int(head_dim * _PARTS[kind]))
        for kind, rope in _ROPES.items()
    }
    ropes = unused | {kind: each.rope for kind, each in zip(types, layers, strict=True)}
    return {
        "max_position_embeddings": config.max_positions,
        "norm_eps": norm.eps,
        "embedding_rank": projection.dim,
        "residual_multiplier": config.layers[0].residual_scale,
        "attention_bias": layers[0].qkv_bias,
        "mlp_bias": network.bias,
        "layer_types": types,
        "sliding_window": plain,
        "per_layer_config": {
            str(i): {"sliding_window": window}
            for i, window in enumerate(windows)
            if window != plain
        },
        **write_ropes(ropes, head_dim),
        **write_head(config, "NeoMME"),
    }


_RULES = (
    Rule("embed_tokens.word_embeddings", "embedding.tokens"),
    Rule("embed_tokens.embedding_projection", "embedding.projection"),
    Rule("layers.{i}.lambdas", "layers.{i}.attention.mix"),
    Rule("layers.{i}.self_attn.exclusive_self_attention.alpha", "layers.{i}.attention.exclusion"),
    *(
        Rule(f"layers.{{i}}.self_attn.output_projection.{name}", f"layers.{{i}}.attention.{name}")
        for name in ("gate_proj", "o_proj")
    ),
    *ATTENTION,
    *NETWORK,
)


def table(values: Mapping[str, Any]) -> Tensors:
    count: int = values["num_hidden_layers"]
    types = values.get("layer_types") or _default_types(count)
    first = _with_vectors(types)[0] if FULL in types else 0
    # A tied head is the embedding's projection and table, which files may hold twice.
    tied = values.get("tie_word_embeddings", True)
    back = (
        Rule("unembedding_projection", "embedding.projection")
        if tied
        else Rule("unembedding_projection", "head.transforms.0.dense", Transposed())
    )
    heads = Heads(
        "lm_head",
        masked=(back,),
        others=r"(lm_head|unembedding_projection)\..+",
        dropped={r"patch_embeddings\..+": "reads pictures, and polyhead reads text"},
    )
    return heads.table(
        values,
        (*_RULES, Rule("value_embeddings", f"layers.{first}.attention.value_table")),
        "model.",
    )


DEFAULTS: Mapping[str, Any] = {
    "embedding_rank": 256,
    "hidden_act": "relu2",
    "mlp_bias": False,
    "norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "layer_types": None,
    "rope_parameters": None,
    "sliding_window": 256,
    "residual_multiplier": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}

FAMILIES = (
    Family(
        "neomme",
        "NeoMME",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        # Of pictures, and of the class for retrieval.
        harmless=frozenset(("patch_size", "document_token_id", "image_token_id", "embedding_dim")),
    ),
)
