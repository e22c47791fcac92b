"""Qwen4-Exp's text model (2026): Qwen3.5's states and gated attention between residual streams.

Parts read the streams by weights of low rank. Full attention reads blocks of keys that an indexer
chooses. Before some layers runs of tokens are looked up (``EngramConfig``), which here is a layer
of its own; so the numbers of later layers are greater than the file's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead.config import (
    EngramConfig,
    GatedDeltaNetConfig,
    GatedSelectiveAttentionConfig,
    LayerConfig,
    LowRankConnectionsConfig,
    MeanIndexerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import qwen3_next
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import FULL, LINEAR
from polyhead.families.common.steps import At, OneToOne, Pieces, Shaped
from polyhead.families.common.tables import AROUND_LAYERS
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.qwen_moe import HARMLESS

_INDEXED, _MOST_SHARDS = "indexed_attention", 1 << 14
_GATES: Mapping[str, Literal["silu", "sigmoid"]] = {"silu": "silu", "sigmoid": "sigmoid"}


def read(keys: Keys) -> TransformerConfig:
    norm = NormConfig(eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    heads: dict[str, Any] = {}
    if (selector := _selector(keys, norm)) is not None:
        heads = {"kind": GatedSelectiveAttentionConfig, "selector": selector}
    plain = qwen3_next.read(
        keys, dense=False, sparse=True, rotated=1.0, kinds=(LINEAR, FULL, _INDEXED), **heads
    )
    streams = LowRankConnectionsConfig(
        keys.size("hc_count"), rank=keys.size("hc_lowrank"), norm=norm
    )
    normalize, gate = keys.flag("norm_topk_prob"), _GATES["silu"]
    if keys.take("output_gate_type", None) is not None:
        gate = keys.choice("output_gate_type", _GATES)
    if not 1 <= (shards := keys.whole("split_ngram_parts")) <= _MOST_SHARDS:
        raise keys.refused("split_ngram_parts", shards, f"1 to {_MOST_SHARDS}")
    before, layers = _engrams(keys, plain, streams), list[LayerConfig]()
    for i, layer in enumerate(plain.layers):
        attention, mixture = layer.attention, layer.feed_forward
        assert isinstance(mixture, MixtureConfig)
        if isinstance(attention, GatedDeltaNetConfig):
            attention = replace(attention, gate=gate)
        elif selector is None:
            raise keys.refused("indexer_n_heads", None, "the indexer's sizes, which layers read")
        elif attention.rope is not None and attention.rope.type in ("dynamic", "longrope"):
            # transformers rotates the keys of all blocks anew in each call, but no cached keys.
            fixed = "a type whose frequencies do not depend on the length"
            raise keys.refused("rope_type", attention.rope.type, fixed)
        if i in before:
            if attention.kind != "gated_delta":
                raise keys.refused("ple_layer_ids", i + 1, "numbers of linear_attention layers")
            layers.append(LayerConfig(before[i], None, norm, streams=streams))
        network = replace(mixture, normalize=normalize)
        layers.append(replace(layer, attention=attention, feed_forward=network, streams=streams))
    return replace(plain, layers=tuple(layers), final_norm=None)


def _selector(keys: Keys, norm: NormConfig) -> MeanIndexerConfig | None:
    """The indexer of all full attention; None where the file has no sizes of it."""
    names = ("indexer_compress_ratio", "indexer_budget", "indexer_n_heads", "indexer_head_dim")
    absent = [name for name in (*names, "indexer_kv_heads") if keys.take(name, None) is None]
    if len(absent) == len(names) + 1:
        return None
    if absent:
        raise keys.refused(absent[0], None, "a number beside the indexer's other sizes")
    keys.expect("indexer_kv_heads", 1)
    size, budget, heads, head_dim = (keys.size(name) for name in names)
    if budget % size:
        raise keys.refused("indexer_budget", budget, f"multiples of indexer_compress_ratio={size}")
    return MeanIndexerConfig(size, budget // size, heads, head_dim, norm)


def _engrams(
    keys: Keys, plain: TransformerConfig, streams: LowRankConnectionsConfig
) -> dict[int, EngramConfig]:
    """By the number of the file's layer that it stands before."""
    ids = _ple_layers({"ple_layer_ids": keys.wholes("ple_layer_ids")})
    width = plain.embed_dim
    sizes: dict[str, Any] = {
        "dim": keys.size("ple_embed_dim", width) or width,
        "longest": keys.whole("ngram_size"),
        "heads": keys.whole("heads_per_ngram"),
        "table_rows": keys.whole("ngram_vocab_size_base"),
        "divisor": keys.whole("make_ngram_vocab_size_divisible_by"),
        "seed": keys.whole("seed"),
        "conv_kernel": keys.whole("ple_conv_kernel_size"),
    }
    if not ids:
        return {}
    if not all(1 <= i <= len(plain.layers) for i in ids):
        raise keys.refused("ple_layer_ids", ids, f"numbers from 1 to {len(plain.layers)}")
    if not plain.eos_token_ids:
        raise keys.refused("eos_token_id", None, "the id that ends runs of tokens")
    sizes |= {
        "streams": streams.count,
        "width": width,
        "vocab_size": plain.vocab_size,
        "end_token_id": plain.eos_token_ids[0],
        "norm": streams.norm,
    }
    return {i - 1: EngramConfig(**sizes, index=index) for index, i in enumerate(ids)}


def _ple_layers(values: Mapping[str, Any]) -> list[int]:
    """The file's layers, counted from 1, behind an engram each."""
    return sorted({*(values.get("ple_layer_ids") or ())})


def write(config: TransformerConfig) -> dict[str, Any]:
    streams, found = config.streams, [*config.layers]
    places = [i for i, layer in enumerate(found) if isinstance(layer.attention, EngramConfig)]
    rest = [layer for i, layer in enumerate(found) if i not in places]
    if not isinstance(streams, LowRankConnectionsConfig) or not rest:
        raise ConfigError("this family has streams that are read by weights of low rank")
    attentions: list[Any] = [layer.attention for layer in rest]
    state = next((each for each in attentions if isinstance(each, GatedDeltaNetConfig)), None)
    networks = (layer.feed_forward for layer in rest)
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    values: dict[str, Any] = {
        **qwen3_next.write(replace(config, layers=tuple(rest)), mixed=False),
        "num_hidden_layers": len(rest),
        "hc_count": streams.count,
        "hc_lowrank": streams.rank,
        "norm_topk_prob": mixture is not None and mixture.normalize,
        "output_gate_type": None if state is None else state.gate,
        "ple_layer_ids": [place - index + 1 for index, place in enumerate(places)],
    }
    if places:
        engram: Any = found[places[0]].attention
        values |= {
            "ple_embed_dim": engram.dim,
            "ple_conv_kernel_size": engram.conv_kernel,
            "ngram_size": engram.longest,
            "heads_per_ngram": engram.heads,
            "ngram_vocab_size_base": engram.table_rows,
            "make_ngram_vocab_size_divisible_by": engram.divisor,
            "seed": engram.seed,
        }
    selectors = (getattr(each, "selector", None) for each in attentions)
    selector = next((each for each in selectors if isinstance(each, MeanIndexerConfig)), None)
    if selector is not None:
        values |= {
            "indexer_n_heads": selector.num_heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": selector.head_dim,
            "indexer_budget": selector.size * selector.top_k,
            "indexer_compress_ratio": selector.size,
        }
    return values


@dataclass(frozen=True)
class PerStream(OneToOne):
    """The weights of norms of all streams, which the file has in one row."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        streams = at.layer.streams
        count = 1 if streams is None else streams.count
        return tensor if tensor.shape[-1] % count else tensor.reshape(count, -1)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flatten()


@dataclass(frozen=True)
class IndexerRows(Pieces):
    """Cut into the rows of all queries of an indexer, and of its one key."""

    def count(self, at: At) -> int:
        return 2

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor.tensor_split([-at.attention.selector.head_dim])


@dataclass(frozen=True)
class Shards(Pieces):
    """Cut into as many runs of rows, all but the last of one size."""

    pieces: int

    def count(self, at: At) -> int:
        return 1

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor.chunk(self.pieces)


def _streams(theirs: str, ours: str) -> tuple[Rule, ...]:
    names = {"input_mix_weight_down": "sum.down", "input_mix_weight_up": "sum.up"}
    return (
        Rule(theirs + "hc_norm", ours + "sum.norm", PerStream()),
        *under(theirs, ours, names | {"block_inject_weight": "inject"}),
    )


_LAYER, _INDEXER = "layers.{i}.", "layers.{i}.self_attn.indexer."
_IN_LAYERS = (
    *qwen3_next.MIXTURE,
    *_streams(_LAYER + "attn_hyper_connection.", _LAYER + "attention_streams."),
    *_streams(_LAYER + "mlp_hyper_connection.", _LAYER + "feed_forward_streams."),
    Rule(
        _INDEXER + "index_qk_proj.weight",
        [f"{_LAYER}attention.selector.{name}_proj.weight" for name in "qk"],
        IndexerRows(),
    ),
    *under(
        _INDEXER,
        _LAYER + "attention.selector.",
        {"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
    ),
)
_PLE, _ENGRAM = "layers.{i}.ple.", "layers.{i}.attention."
_ENGRAMS = (
    *under(_PLE, _ENGRAM, {"key_proj": "k_proj", "value_proj": "v_proj"}),
    *(
        Rule(f"{_PLE}norm_{theirs}", f"{_ENGRAM}{ours}_norm", PerStream())
        for theirs, ours in (("key", "k"), ("query", "q"), ("conv", "conv"))
    ),
    Rule(_PLE + "conv1d.weight", _ENGRAM + "conv_weight", Shaped((1,))),
)
_EMBEDDING = _PLE + "ple_embedding."


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; an engram and the file's layer behind it are two layers here."""
    values, place = {**DEFAULTS, **values}, 0
    behind = _ple_layers(values)
    rules = [AROUND_LAYERS[0], *_streams("hyper_connection_mixer.", "streams.")]
    numbers: dict[str, Tensor] = {}
    for i, kind in enumerate(qwen3_next.layer_types(values)):
        if i + 1 in behind:
            engram = _hashes(values, behind.index(i + 1))
            table = _table(engram.rows, values["split_ngram_parts"])
            rules += [rule.at(i, place) for rule in (*table, *_ENGRAMS)]
            for name, each in _numbers(engram).items():
                numbers[f"{_EMBEDDING}{name}".format(i=i)] = torch.tensor(each, device="cpu")
            place += 1
        attention = qwen3_next.attention_rules(kind, joined=False)
        rules += [rule.at(i, place) for rule in (*attention, *_IN_LAYERS)]
        place += 1
    follow = {re.escape(name): "follows from the configuration" for name in numbers}
    dropped = qwen3_next.dropped(values) | follow
    return Tensors(tuple(rules), dropped=dropped, constants=numbers)


def _hashes(values: Mapping[str, Any], index: int) -> EngramConfig:
    """An engram with the hashes of the file's."""
    heads, longest = values["heads_per_ngram"], values["ngram_size"]
    return EngramConfig(
        streams=1, width=1, end_token_id=0, dim=(longest - 1) * heads, index=index,
        vocab_size=values["vocab_size"], longest=longest, heads=heads, seed=values["seed"],
        table_rows=values["ngram_vocab_size_base"],
        divisor=values["make_ngram_vocab_size_divisible_by"],
    )  # fmt: skip


def _numbers(engram: EngramConfig) -> dict[str, Sequence[int]]:
    """What transformers keeps of the hashes."""
    sizes = engram.sizes
    return {
        "layer_multipliers": engram.multipliers,
        "ngram_heads_vocab_sizes": sizes,
        "ngram_heads_offsets": [sum(sizes[:i]) for i in range(len(sizes))],
    }


def _table(rows: int, shards: int) -> tuple[Rule, ...]:
    """Rules of an engram's rows, which files have in shards, or together."""
    names = [str(shard) for shard in range(-(-rows // -(-rows // shards)))]
    theirs, ours = _EMBEDDING + "ngram_embedding", _ENGRAM + "table"
    return (
        Rule(f"{theirs}.shard_{{part}}", ours, parts=names, cut=Shards(shards)),
        Rule(theirs, ours),
    )


DEFAULTS: Mapping[str, Any] = {
    **qwen3_next.DEFAULTS,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "output_gate_type": None,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": None,
    "ple_embed_dim": None,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
    "indexer_n_heads": None,
    "indexer_kv_heads": None,
    "indexer_head_dim": None,
    "indexer_budget": None,
    "indexer_compress_ratio": None,
}

FAMILIES = (
    Family(
        "qwen4_exp_text",
        "Qwen4Exp",
        read,
        tensors,
        defaults=DEFAULTS,
        write=write,
        # transformers counts its convolutions there.
        harmless=HARMLESS | qwen3_next.UNUSED | {"number_of_conv_states"},
    ),
)
