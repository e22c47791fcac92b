"""UltraBERT: Llama's layers that see both ways, with windows in two of three.

Two layers stand before the logits of masked tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    LayerConfig,
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
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import read_ropes, write_ropes
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tasks import MASKED, PRE_TRAINING, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors

_THETA: Mapping[str, float] = {FULL: 2_560_000.0, SLIDING: 10_000.0}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    window, default = _read_windows(keys, sizes.num_layers)
    types = read_layer_types(keys, sizes.num_layers, default)
    parameters = keys.take("rope_parameters", None) or {}
    ropes = read_ropes(
        Keys({"rope_parameters": parameters}, keys.where),
        sizes.head_dim,
        sizes.max_positions,
        _read_thetas(keys, types),
    )
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")
    )
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=window + 1, window_ahead=window),
    }
    network = read_network(keys, bias=keys.flag("mlp_bias"))
    first = HeadTransformConfig(keys.size("prediction_head_size"), "gelu_tanh", bias=False)
    return read_encoder(
        keys,
        tuple(LayerConfig(of_kind[kind], network, norm) for kind in types),
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(),
        final_norm=norm,
        **read_head(
            keys,
            first,
            replace(first, dim=sizes.embed_dim),
            head_bias=False,
            pooling=keys.choice("classifier_pooling", {"cls": "first", "mean": "mean"}),
            without=(PRE_TRAINING,),
        ),
    )


def _read_windows(keys: Keys, num_layers: int) -> tuple[int, list[str]]:
    """Keys that a window has on either side, and the kinds of layers where no key lists them.

    The first files list every layer's window.
    """
    window, listed = keys.size("sliding_window"), keys.take("attention_windows", None)
    if listed is None:
        return window, [SLIDING if (i + 1) % 3 else FULL for i in range(num_layers)]
    sizes = [each or 0 for each in listed] if isinstance(listed, list) else []
    known = all(type(each) is int and each >= 0 for each in sizes) and len(sizes) == num_layers
    if not known or len({*sizes} - {0}) > 1:
        wanted = f"one window and null or 0, of {num_layers} layers"
        raise keys.refused("attention_windows", listed, wanted)
    return max(sizes) or window, [SLIDING if each else FULL for each in sizes]


def _read_thetas(keys: Keys, types: list[str]) -> Mapping[str, float]:
    """The base of each kind of layer, which the first files state of every layer."""
    listed = keys.take("rope_theta", None)
    if listed is None:
        return _THETA
    whole = isinstance(listed, list) and len(listed) == len(types)
    said = dict(zip(types, listed, strict=True)) if whole else {}
    if not whole or [said[kind] for kind in types] != listed:
        wanted = f"{len(types)} numbers, the same in layers of one kind"
        raise keys.refused("rope_theta", listed, wanted)
    return {kind: Keys(said, keys.where).number(kind, theta) for kind, theta in _THETA.items()}


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    ropes = {FULL if each.window is None else SLIDING: each.rope for each in layers}
    transforms, task = config.head_transforms, config.task
    window = next((each.window_ahead for each in layers if each.window), None)
    return {
        "max_position_embeddings": config.max_positions,
        "rope_theta": None,  # among the parameters
        "sliding_window": window or DEFAULTS["sliding_window"],
        "prediction_head_size": (transforms[0].dim if transforms else None)
        or DEFAULTS["prediction_head_size"],
        "classifier_pooling": "mean" if task is not None and task.pooling == "mean" else "cls",
        **write_ropes({kind: ropes.get(kind) or RopeConfig(_THETA[kind]) for kind in _THETA}),
        **write_head(config, "Ultrabert"),
    }


HEADS = Heads(
    "cls",
    masked=tuple(Rule(f"head.linear{i + 1}", f"head.transforms.{i}.dense") for i in range(2)),
    others=r"(head|cls)\..+",
    dropped=DECODER.dropped,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, DECODER.rules, "ultrabert.")


DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "classifier_pooling": "cls",
    "sliding_window": 128,
    "layer_types": None,
    "rope_parameters": None,
    "prediction_head_size": 768,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES = (
    Family(
        "ultrabert",
        "Ultrabert",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
    ),
)
