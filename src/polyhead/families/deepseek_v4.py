"""DeepSeek-V4 (2026): windows and blocks that layers compress themselves, several residual streams
that are mixed, and experts that in the first layers the ids of tokens choose.

Files have the names that DeepSeek gives tensors; transformers writes them too. A head's last
features are rotated in pairs, which are its keys' and values' alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from polyhead.config import (
    CompressedAttentionConfig,
    FeedForwardConfig,
    IndexerConfig,
    LayerConfig,
    MixedConnectionsConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TokenMixtureConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import DRAFTS
from polyhead.families.common.reading import (
    SLIDING,
    read_activation,
    read_decoder,
    read_layer_types,
    read_rms_norm,
)
from polyhead.families.common.rope import reach, read_rope, stated_length, write_ropes
from polyhead.families.common.steps import At, OneToOne, RotaryPairs, Transposed
from polyhead.families.common.tensors import Rule, Tensors, under

_CHOSEN, _ALL = "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = (SLIDING, _CHOSEN, _ALL)
_BY_IDS, _BY_SCORES = "hash_moe", "moe"
_RATIOS = {0: SLIDING, 4: _CHOSEN, 128: _ALL}
_RATES = {_CHOSEN: 4, _ALL: 128}
_MAIN, _COMPRESS = "main", "compress"
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def read(keys: Keys) -> TransformerConfig:
    count, norm = keys.num_layers("num_hidden_layers"), read_rms_norm(keys)
    keys.expect("num_key_value_heads", 1)
    max_positions = keys.whole("max_position_embeddings")
    kinds = _read_kinds(keys, count)
    ropes = _read_ropes(keys, max_positions)
    attentions = {kind: _attention(keys, kind, norm, ropes) for kind in _KINDS}
    for key in ("compress_rates", "compress_rate_csa", "compress_rate_hca"):
        keys.take(key, None)
    first = [_BY_IDS] * min(count, keys.whole("num_hash_layers", 3))
    choosing = read_layer_types(
        keys,
        count,
        first + [_BY_SCORES] * (count - len(first)),
        (_BY_IDS, _BY_SCORES),
        "mlp_layer_types",
    )
    by_scores, by_ids = _mixtures(keys)
    streams = MixedConnectionsConfig(
        keys.size("hc_mult"),
        eps=keys.number("hc_eps"),
        norm_eps=norm.eps,
        iterations=keys.size("hc_sinkhorn_iters"),
    )
    layers = [
        LayerConfig(
            attentions[kind], by_ids if choice == _BY_IDS else by_scores, norm, streams=streams
        )
        for kind, choice in zip(kinds, choosing, strict=True)
    ]
    rope = ropes[_COMPRESS if {*kinds} != {SLIDING} else _MAIN]
    return read_decoder(keys, layers, max_positions=reach(rope, max_positions), norm=norm)


def _read_kinds(keys: Keys, count: int) -> list[str]:
    """Which layers compress how: by a list, by ratios, or by turns."""
    ratios = keys.take("compress_ratios", None)
    default = [_ALL] * min(count, 2) + [_CHOSEN if i % 2 else _ALL for i in range(count - 2)]
    if ratios is not None:
        known = isinstance(ratios, list) and all(
            type(each) is int and each in _RATIOS for each in ratios
        )
        if not known or len(ratios) < count:
            wanted = f"{', '.join(map(str, _RATIOS))} for {count} layers"
            raise keys.refused("compress_ratios", ratios, wanted)
        default = [_RATIOS[each] for each in ratios[:count]]
    return read_layer_types(keys, count, default, _KINDS)


def _read_ropes(keys: Keys, max_positions: int) -> dict[str, RopeConfig]:
    """Of layers with a window alone, and of those that compress, which yarn may stretch."""
    size = keys.size("head_dim")
    stated = keys.whole("qk_rope_head_dim", None)
    part = keys.number("partial_rotary_factor", None)
    part = (64 / 512 if stated is None else stated / size) if part is None else part
    if stated is not None and stated != int(size * part):
        raise keys.refused("qk_rope_head_dim", stated, f"{int(size * part)}, as the share says")
    thetas = {_MAIN: keys.number("rope_theta"), _COMPRESS: keys.number("compress_rope_theta")}
    new, old = keys.take("rope_parameters", None), keys.take("rope_scaling", None)
    if new and old and new != old:
        raise keys.refused("rope_scaling", old, "only one of rope_parameters and rope_scaling")
    values = new or old or {}
    if not isinstance(values, Mapping):
        raise keys.refused("rope_parameters", values, "an object")
    inner = {kind: values.get(kind) for kind in thetas}
    if not all(isinstance(each, Mapping) for each in inner.values()):
        flat = {key: value for key, value in values.items() if key not in thetas}
        if flat.get("rope_type", flat.get("type")) == "yarn":
            flat.setdefault("attention_factor", 1.0)
        flat = {key: value for key, value in flat.items() if key != "partial_rotary_factor"}
        inner = {_MAIN: {}, _COMPRESS: flat | {"rope_theta": thetas[_COMPRESS]}}
    return {
        kind: read_rope(
            Keys({"rope_parameters": inner[kind]}, f"{keys.where}: rope_parameters.{kind}"),
            size,
            max_positions,
            theta=theta,
            partial_rotary_factor=part,
        )
        for kind, theta in thetas.items()
    }


def _attention(
    keys: Keys, kind: str, norm: NormConfig, ropes: Mapping[str, RopeConfig]
) -> CompressedAttentionConfig:
    rope, size = ropes[_MAIN if kind == SLIDING else _COMPRESS], keys.size("head_dim")
    indexer = IndexerConfig(
        keys.size("index_n_heads"),
        keys.size("index_head_dim"),
        keys.size("index_topk"),
        norm,
        "last",
    )
    return CompressedAttentionConfig(
        keys.size("num_attention_heads"),
        size,
        keys.size("q_lora_rank"),
        rope.dim or size,
        keys.size("sliding_window"),
        keys.size("o_groups"),
        keys.size("o_lora_rank"),
        None if kind == SLIDING else _rate(keys, kind),
        overlap=kind == _CHOSEN,
        indexer=indexer if kind == _CHOSEN else None,
        norm=norm,
        rope=rope,
        dropout=keys.number("attention_dropout"),
    )


def _rate(keys: Keys, kind: str) -> int:
    """Tokens of a block."""
    own = keys.whole("compress_rate_csa" if kind == _CHOSEN else "compress_rate_hca", None)
    rates = keys.take("compress_rates", None)
    rates = _RATES if rates is None else rates
    found = own
    if own is None and isinstance(rates, Mapping):
        found = rates.get(kind)
    if type(found) is not int or found < 2:
        raise keys.refused("compress_rates", rates, f"{_CHOSEN} and {_ALL}, whole numbers from 2")
    return found


def _mixtures(keys: Keys) -> tuple[MixtureConfig, TokenMixtureConfig]:
    """Experts that scores choose, and those that ids choose."""
    keys.expect("n_shared_experts", 1)
    keys.expect("norm_topk_prob", True)
    keys.expect("topk_method", "noaux_tc", None)
    width, limit = keys.whole("moe_intermediate_size"), keys.positive("swiglu_limit")
    expert = FeedForwardConfig(width, activation=read_activation(keys), clamp=limit)
    scoring: Any = keys.choice("scoring_func", {each: each for each in ("sqrtsoftplus", "sigmoid")})
    given: dict[str, Any] = {
        "expert": expert,
        "num_experts": keys.whole("n_routed_experts"),
        "experts_per_token": keys.whole("num_experts_per_tok"),
        "shared": replace(expert, bias=keys.flag("mlp_bias")),
        "scoring": scoring,
        "normalize": True,
        "scale": keys.number("routed_scaling_factor"),
    }
    by_ids = TokenMixtureConfig(**given, vocab_size=keys.whole("vocab_size"))
    return MixtureConfig(**given, choice_bias=True), by_ids


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [*config.layers]
    found, networks = [each.attention for each in layers], [each.feed_forward for each in layers]
    if not all(
        isinstance(each.streams, MixedConnectionsConfig)
        and isinstance(each.attention, CompressedAttentionConfig)
        and isinstance(each.feed_forward, MixtureConfig)
        for each in layers
    ):
        raise ConfigError("this family has compressed blocks, mixed streams and experts")
    kinds = [
        SLIDING if each.block_size is None else _CHOSEN if each.overlap else _ALL for each in found
    ]
    of_kind = dict(zip(kinds, found, strict=True))
    ropes = {_MAIN if kind == SLIDING else _COMPRESS: each.rope for kind, each in of_kind.items()}
    first, mixture, streams = found[0], networks[0], layers[0].streams
    plain = RopeConfig(dim=next(iter(ropes.values())).dim)
    for kind, theta in ((_MAIN, 1e4), (_COMPRESS, 1.6e5)):
        ropes.setdefault(kind, replace(plain, theta=theta))
    indexer = next((each.indexer for each in found if each.indexer is not None), IndexerConfig())
    rope = ropes[_MAIN if {*kinds} == {SLIDING} else _COMPRESS]
    return {
        **write_ropes({_MAIN: ropes[_MAIN], _COMPRESS: ropes[_COMPRESS]}, first.head_dim),
        "rope_theta": ropes[_MAIN].theta,
        "compress_rope_theta": ropes[_COMPRESS].theta,
        "rope_scaling": None,
        "partial_rotary_factor": first.rotated / first.head_dim,
        "qk_rope_head_dim": first.rotated,
        "max_position_embeddings": stated_length(rope, config.max_positions),
        "num_key_value_heads": 1,
        "layer_types": kinds,
        "compress_rates": _RATES
        | {kind: each.block_size for kind, each in of_kind.items() if kind != SLIDING},
        "mlp_layer_types": [_BY_IDS if each.reads_tokens else _BY_SCORES for each in networks],
        "q_lora_rank": first.q_lora_rank,
        "sliding_window": first.window,
        "o_groups": first.out_groups,
        "o_lora_rank": first.out_rank,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "hc_mult": streams.count,
        "hc_eps": streams.eps,
        "hc_sinkhorn_iters": streams.iterations,
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "n_routed_experts": mixture.num_experts,
        "n_shared_experts": 1,
        "routed_scaling_factor": mixture.scale,
        "scoring_func": mixture.scoring,
        "swiglu_limit": mixture.expert.clamp,
    }


@dataclass(frozen=True)
class LastPairs(RotaryPairs):
    """``RotaryPairs`` of a head's last features; of the indexer's heads with ``indexer``."""

    last: bool = True
    indexer: bool = False

    def _sizes(self, attention: Any) -> tuple[int, int]:
        index = attention.indexer
        size = attention.head_dim if not self.indexer else 0 if index is None else index.head_dim
        return size, attention.rotated


@dataclass(frozen=True)
class ExpertNumbers(OneToOne):
    """Numbers of experts, of any integers."""

    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        if tensor.is_floating_point():
            raise ValueError(f"experts have whole numbers: got {tensor.dtype}")
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < at.experts:
            raise ValueError(
                f"experts have numbers from 0 to {at.experts - 1}: got {int(tensor.min())} to "
                f"{int(tensor.max())}"
            )
        return tensor.long()

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor


_LAYER = "layers.{i}."
_ATTENTION = _LAYER + "attn."
_OURS = _LAYER + "attention."


def _pooling(theirs: str, ours: str, pairs: LastPairs) -> tuple[Rule, ...]:
    return (
        Rule(theirs + "wkv", ours + "kv_proj", pairs),
        Rule(theirs + "wgate", ours + "gate_proj", pairs),
        Rule(theirs + "norm", ours + "norm", pairs),
        Rule(theirs + "ape", ours + "positions", Transposed(), pairs, Transposed()),
    )


_PAIRS, _INDEX = LastPairs(), LastPairs(indexer=True)
TENSORS = Tensors(
    (
        Rule("embed_tokens", "embedding.tokens"),
        Rule("embed", "embedding.tokens"),
        Rule("norm", "final_norm"),
        *under(
            _LAYER,
            _LAYER,
            {
                "attn_norm": "attention_norm",
                "ffn_norm": "feed_forward_norm",
                "attn.wq_a": "attention.q_a_proj",
                "attn.q_norm": "attention.q_a_norm",
                "attn.wo_b": "attention.o_proj",
                "attn.attn_sink": "attention.sinks",
                "attn.indexer.weights_proj": "attention.indexer.weights_proj",
                "ffn.gate": "feed_forward.router",
                "ffn.gate.bias": "feed_forward.choice_bias",
                **{
                    f"ffn.{theirs}.{name}": f"feed_forward.{ours}.{proj}_proj"
                    for theirs, ours in (
                        ("experts.{j}", "experts.{j}"),
                        ("shared_experts", "shared"),
                    )
                    for name, proj in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
                },
                **{
                    f"hc_{theirs}_{name}": f"{ours}_streams.{leaf}"
                    for theirs, ours in (("attn", "attention"), ("ffn", "feed_forward"))
                    for name, leaf in (("fn", "weight"), ("base", "bias"), ("scale", "factors"))
                },
            },
        ),
        Rule(_LAYER + "ffn.gate.tid2eid", _LAYER + "feed_forward.table", ExpertNumbers()),
        Rule(_ATTENTION + "wq_b", _OURS + "q_b_proj", _PAIRS),
        Rule(_ATTENTION + "wkv", _OURS + "kv_proj", _PAIRS),
        Rule(_ATTENTION + "norm", _OURS + "kv_norm", _PAIRS),
        Rule(_ATTENTION + "kv_norm", _OURS + "kv_norm", _PAIRS),
        Rule(_ATTENTION + "wo_a", _OURS + "o_a_proj", Transposed(), _PAIRS, Transposed()),
        Rule(_ATTENTION + "indexer.wq_b", _OURS + "indexer.q_proj", _INDEX),
        *_pooling(_ATTENTION + "compressor.", _OURS + "pooling.", _PAIRS),
        *_pooling(_ATTENTION + "indexer.compressor.", _OURS + "indexer.pooling.", _INDEX),
        *(
            Rule(theirs + name, f"streams.{leaf}")
            for theirs in ("hc_head.hc_", "hc_head_")
            for name, leaf in (("fn", "weight"), ("base", "bias"), ("scale", "factors"))
        ),
    ),
    outside=(Rule("head", "head"), Rule("lm_head", "head")),
    dropped={r"mtp\..+": DRAFTS},
)

FAMILIES = (
    Family(
        "deepseek_v4",
        "DeepseekV4",
        read,
        TENSORS,
        defaults={
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "rope_theta": 10_000.0,
            "compress_rope_theta": 160_000.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1_048_576,
            "q_lora_rank": 1024,
            "head_dim": 512,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 2048,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        },
        write=write,
        # No projection of attention has a bias; the rest is of training and drafting.
        harmless=frozenset(("attention_bias", "num_nextn_predict_layers", *_TRAINING)),
        not_supported={"expert_dtype": "experts in FP4 with scales beside them are not read"},
    ),
)
