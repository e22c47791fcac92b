"""Small attention layers of every kind, which several test modules build."""

from __future__ import annotations

import torch

from polyhead.config import AttentionConfig, NormConfig, QKNormConfig, RopeConfig
from polyhead.layers import MultiHeadAttention

CONFIGS = {
    "plain": {},
    "rope": {"rope": RopeConfig(theta=100.0)},
    "partial rope": {"rope": RopeConfig(dim=4)},
    "norm before rope": {"rope": RopeConfig(), "qk_norm": QKNormConfig()},
    "norm after rope": {"rope": RopeConfig(), "qk_norm": QKNormConfig(place="after_rope")},
    "full-width norm": {"rope": RopeConfig(), "qk_norm": QKNormConfig(place="full_width")},
    "layernorm": {"qk_norm": QKNormConfig(NormConfig("layernorm", bias=True))},
    "wide values": {"rope": RopeConfig(), "v_head_dim": 12},
    "biases": {"rope": RopeConfig(), "qkv_bias": True, "out_bias": True},
    "window": {"rope": RopeConfig(), "window": 5},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "sinks": {"rope": RopeConfig(), "sinks": True},
}


def built(num_heads: int = 4, num_kv_heads: int = 2, **fields) -> MultiHeadAttention:
    """A layer of width 24 in evaluation, its norms and sinks at random."""
    config = AttentionConfig(num_heads, num_kv_heads, 8, **fields)
    layer = MultiHeadAttention.from_config(24, config).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name == "sinks":
                parameter.normal_(1.0)
    return layer
