"""Single layers on a mesh against the same layers in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_models import FAMILIES, ROPE, E, compare_gradients
from torch import nn

import polyhead as ph
from polyhead import parallel
from polyhead.config import AttentionConfig
from polyhead.layers import MultiHeadAttention, TransformerLayer
from polyhead.layers.differential_attention import DifferentialAttentionConfig
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.gated_attention import GatedAttentionConfig
from polyhead.layers.off_by_one_attention import OffByOneAttentionConfig
from polyhead.layers.scalable_softmax_attention import ScalableSoftmaxAttentionConfig

T = 21

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention with ALiBi": lambda: MultiHeadAttention.from_config(
        E, FAMILIES["Bloom"]().layers[0].attention
    ),
    "a layer with latents": lambda: TransformerLayer.from_config(
        E, FAMILIES["DeepSeek"]().layers[0]
    ),
    "a layer with experts": lambda: TransformerLayer.from_config(
        E, FAMILIES["gpt-oss"]().layers[0]
    ),
    "a network": lambda: FeedForward.from_config(E, FAMILIES["Llama"]().layers[0].feed_forward),
}

NOT_ON_TENSOR: dict[str, Callable[[], nn.Module]] = {
    "a layer with gated attention": lambda: _layer_of(GatedAttentionConfig(4, 2, 8, rope=ROPE)),
    "a layer with differential attention": lambda: _layer_of(
        DifferentialAttentionConfig(4, 2, 8, rope=ROPE)
    ),
    "a layer with scalable softmax": lambda: _layer_of(
        ScalableSoftmaxAttentionConfig(4, 2, 8, rope=ROPE)
    ),
    "a layer with softmax off by one": lambda: _layer_of(
        OffByOneAttentionConfig(4, 2, 8, rope=ROPE)
    ),
}


def _layer_of(attention: AttentionConfig) -> nn.Module:
    return TransformerLayer.from_config(
        E, replace(FAMILIES["Llama"]().layers[0], attention=attention)
    )


def _made(name: str) -> nn.Module:
    layer = (LAYERS | NOT_ON_TENSOR)[name]().double()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    return layer


def equal(name: str, dimension: str) -> None:
    """Outputs and every gradient."""
    generator = torch.Generator().manual_seed(9)
    x, weight = (torch.randn(2, T, E, generator=generator, dtype=torch.float64) for _ in range(2))
    call = {} if name == "a network" else {"mask": ph.Causal()}
    one, mesh = _made(name), mesh_of(dimension)
    wanted = one(x, **call)
    (wanted * weight).sum().backward()
    layer = parallel.parallelize(_made(name), mesh)
    found = layer(parallel.shard(x, mesh), **call)
    # Gradients are averaged over ranks, of which each has the sum over its own tokens.
    ranks = dist.get_world_size() if dimension == "context" else 1
    (found * parallel.shard(weight, mesh)).sum().mul(ranks).backward()
    apart = (parallel.gather(found, mesh) - wanted).abs().max().item()
    assert apart <= 1e-12, f"{name} on {dimension}: outputs differ by {apart:.1e}"
    # λ of differential attention is computed in float32.
    compare_gradients(layer, one, 1e-7 if "differential" in name else 1e-12)


def other_tokens(dimension: str) -> None:
    """Rank 1 has another number of tokens."""
    layer = parallel.parallelize(_made("attention with ALiBi"), mesh_of(dimension))
    layer(torch.zeros(1, 9 + 3 * dist.get_rank(), E, dtype=torch.float64))
