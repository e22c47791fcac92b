"""Latent attention equals transformers' DeepSeek-V2 and V3, from their own state dicts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.config import FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.families import find_family
from polyhead.layers import LatentAttentionConfig, MultiHeadLatentAttention, RopeConfig

R, P, H, N, V = 24, 8, 4, 16, 12
SIZES: dict[str, Any] = {
    "num_heads": H,
    "kv_lora_rank": R,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": P,
    "v_head_dim": V,
}
BOTH = pytest.mark.parametrize("computation", ["absorbed", "expanded"])


def _table(config: LatentAttentionConfig, interleaved: bool) -> tuple[Any, TransformerConfig]:
    values = {"num_hidden_layers": 1, "rope_interleave": interleaved}
    layer = LayerConfig(config, FeedForwardConfig(8))
    model = TransformerConfig("decoder", 8, 48, 2560, (layer,))
    return find_family("deepseek_v3", "config.json").tensors_of(values), model


def from_deepseek(
    state: dict[str, Tensor], config: LatentAttentionConfig, interleaved: bool = True
) -> dict[str, Tensor]:
    table, model = _table(config, interleaved)
    named = {f"model.layers.0.self_attn.{name}": tensor for name, tensor in state.items()}
    ours, _ = table.to_ours(named, model, "here")
    return {name.removeprefix("layers.0.attention."): tensor for name, tensor in ours.items()}


def to_deepseek(state: dict[str, Tensor], config: LatentAttentionConfig) -> dict[str, Tensor]:
    table, model = _table(config, True)
    named = {f"layers.0.attention.{name}": tensor for name, tensor in state.items()}
    theirs = table.to_theirs(named, model)
    return {name.removeprefix("model.layers.0.self_attn."): t for name, t in theirs.items()}


def tokens(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, 48, generator=torch.Generator().manual_seed(1))


def deepseek(version: int, **changes: Any) -> tuple[Any, Any, Any]:
    """transformers' attention module, its rotary module, and their configuration."""
    name = f"deepseek_v{version}"
    models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    prefix = f"DeepseekV{version}"
    config = getattr(configs, f"{prefix}Config")(
        hidden_size=48,
        num_attention_heads=H,
        num_key_value_heads=H,
        kv_lora_rank=R,
        qk_nope_head_dim=N,
        qk_rope_head_dim=P,
        v_head_dim=V,
        max_position_embeddings=2560,
        **{"q_lora_rank": 20, **changes},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = getattr(models, f"{prefix}Attention")(config, 0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module, getattr(models, f"{prefix}RotaryEmbedding")(config), config


def run_deepseek(module: Any, rotary: Any, x: Tensor, first: int = 0) -> Tensor:
    T = x.shape[1]
    positions = torch.arange(first, first + T)[None]
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        out: Tensor = module(x, position_embeddings=rotary(x, positions), attention_mask=mask)[0]
    return out


@BOTH
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("q_lora_rank", [20, None])
@pytest.mark.parametrize("yarn", [False, True])
def test_equals_transformers(
    version: int, q_lora_rank: int | None, yarn: bool, computation: Any
) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if yarn:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        }
    theirs, rotary, _ = deepseek(
        version, q_lora_rank=q_lora_rank, rope_parameters=rope, attention_bias=True
    )
    config = LatentAttentionConfig(
        **SIZES,
        q_lora_rank=q_lora_rank,
        bias=True,
        rope=RopeConfig(
            type="yarn",
            factor=40.0,
            original_max_positions=64,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=0.707,
        )
        if yarn
        else RopeConfig(),
    )
    ours = MultiHeadLatentAttention.from_config(48, config).eval()
    ours.load_state_dict(from_deepseek(theirs.state_dict(), config))
    x = tokens(150)
    with torch.no_grad():
        got = ours(x, mask=ph.Causal(), computation=computation)
    torch.testing.assert_close(got, run_deepseek(theirs, rotary, x), atol=1e-5, rtol=1e-5)
    far = torch.arange(1000, 1150)
    with torch.no_grad():
        got = ours(x, mask=ph.Causal(), positions=far, computation=computation)
    torch.testing.assert_close(got, run_deepseek(theirs, rotary, x, 1000), atol=1e-5, rtol=1e-5)


def test_half_split_files_load_without_permuting() -> None:
    theirs, rotary, _ = deepseek(3, rope_interleave=False)
    config = LatentAttentionConfig(**SIZES, q_lora_rank=20)
    ours = MultiHeadLatentAttention.from_config(48, config).eval()
    ours.load_state_dict(from_deepseek(theirs.state_dict(), config, interleaved=False))
    x = tokens(20)
    with torch.no_grad():
        got = ours(x, mask=ph.Causal())
    torch.testing.assert_close(got, run_deepseek(theirs, rotary, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_lora_rank", [20, None])
def test_names_and_rows_return_to_deepseeks(q_lora_rank: int | None) -> None:
    theirs, _, _ = deepseek(3, q_lora_rank=q_lora_rank, attention_bias=True)
    config = LatentAttentionConfig(**SIZES, q_lora_rank=q_lora_rank, bias=True)
    there = from_deepseek(theirs.state_dict(), config)
    back = to_deepseek(there, config)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name
    assert not torch.equal(there["kv_a_proj_with_mqa.weight"], theirs.kv_a_proj_with_mqa.weight)
