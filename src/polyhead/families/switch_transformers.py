"""Switch Transformers (Fedus et al. 2022): T5 with experts in every few layers; a token visits one,
if there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyhead.config import FeedForwardConfig, InitialConfig, MixtureConfig, TransformerConfig
from polyhead.config.layout import Network
from polyhead.families.bart import APART, SHARED
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation
from polyhead.families.common.tensors import Tensors
from polyhead.families.t5 import ALIASES, DEFAULTS, depths, read_stacks, tables, write_stacks


def read(keys: Keys) -> TransformerConfig:
    network = FeedForwardConfig(
        keys.whole("intermediate_size"),
        read_activation(keys),
        gated=False,
        dropout=keys.number("hidden_dropout_prob"),
    )
    mixture = MixtureConfig(
        network,
        num_experts=keys.whole("num_experts"),
        experts_per_token=1,
        capacity=keys.whole("expert_capacity"),
        router_bias=keys.flag("router_bias"),
    )
    keys.expect("router_dtype", "float32")
    encoder, decoder = (
        _networks(keys, side, layers, (network, mixture))
        for side, layers in zip(("encoder", "decoder"), depths(keys), strict=True)
    )
    tied = keys.flag("tie_word_embeddings")
    config = read_stacks(keys, (encoder, decoder), scaled=tied)
    if tied:
        return config
    # Without ties transformers gives either stack tokens of its own.
    return replace(
        config,
        encoder=replace(config.encoder, embedding=config.embedding, own_tokens=True),
    )


def _networks(keys: Keys, side: str, layers: int, kinds: tuple[Network, Network]) -> list[Network]:
    """A stack's networks: of every so many layers one has experts."""
    sparse = keys.whole(f"num_sparse_{side}_layers")
    step = keys.whole(f"{side}_sparse_step", layers // sparse if sparse > 0 else layers)
    return [kinds[step > 0 and (i % step == 1 or step == 1)] for i in range(layers)]


def write(config: TransformerConfig) -> dict[str, Any]:
    stacks: list[list[Any]] = [[each.feed_forward for each in config.encoder_layers]]
    stacks.append([each.feed_forward for each in config.layers])
    mixture = next(each for stack in stacks for each in stack if each.kind == "mixture")
    steps = {
        f"{side}_sparse_step": _step([each.kind == "mixture" for each in stack])
        for side, stack in zip(("encoder", "decoder"), stacks, strict=True)
    }
    return {
        **write_stacks(config),
        **steps,
        "d_ff": mixture.expert.hidden_dim,
        "num_experts": mixture.num_experts,
        "expert_capacity": mixture.capacity,
        "router_bias": mixture.router_bias,
    }


def _step(sparse: Sequence[bool]) -> int:
    """The distance of layers with experts; 0: there are none."""
    places = [i for i, each in enumerate(sparse) if each]
    if not places:
        return 0
    if len(places) > 1:
        return places[1] - places[0]
    return 1 if len(sparse) == 1 else len(sparse)


_TABLES = {
    tied: Tensors(
        (
            *(SHARED if tied else APART),
            *tables(
                {
                    "router.classifier": "router",
                    "experts.expert_{j}.wi": "experts.{j}.up_proj",
                    "experts.expert_{j}.wo": "experts.{j}.down_proj",
                    "wi": "up_proj",
                    "wo": "down_proj",
                },
                "mlp",
            ),
        ),
        prefix="",
        dropped={} if tied else {r"shared\.weight": "the stacks have tokens of their own"},
    )
    for tied in (True, False)
}


def _tensors(values: Mapping[str, Any]) -> Tensors:
    return _TABLES[bool(values.get("tie_word_embeddings", True))]


FAMILIES = (
    Family(
        "switch_transformers",
        "SwitchTransformers",
        read,
        _tensors,
        initial=InitialConfig("width", 1.0),
        initial_key="initializer_factor",
        defaults={
            **DEFAULTS,
            "num_decoder_layers": 12,
            "hidden_act": "relu",
            "num_sparse_encoder_layers": 3,
            "num_sparse_decoder_layers": 3,
            "num_experts": 8,
            "expert_capacity": 64,
            "router_bias": False,
            "router_dtype": "float32",
        },
        write=write,
        aliases={**ALIASES, "hidden_act": "dense_act_fn"},
        not_supported={
            "is_decoder": "only encoder and decoder together are built",
            "add_cross_attention": "only encoder and decoder together are built",
        },
        harmless=frozenset(
            (
                "n_positions",
                "feed_forward_proj",
                "is_gated_act",
                "router_jitter_noise",
                "router_ignore_padding_tokens",
                "router_z_loss_coef",
                "router_aux_loss_coef",
                "router_type",
                "batch_prioritized_routing",
                "add_router_probs",
                "num_selected_experts",
            )
        ),
        with_head="ForConditionalGeneration",
    ),
)
