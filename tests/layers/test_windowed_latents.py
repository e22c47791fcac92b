"""Latents with windows, with a norm over the rotary key and without one, with queries that grow,
in several heads; gates of whole heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_models import check_decoding

import polyhead as ph
from polyhead.checkpoints import Checkpoint, save_checkpoint
from polyhead.config import (
    FeedForwardConfig,
    GatedLatentAttentionConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    RopeConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.config.attention import QueryTemperatureConfig
from polyhead.conversion import convert
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import MultiHeadLatentAttention, SparseLatentAttention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, CAUSAL = 32, ph.Causal()
PLAIN = LatentAttentionConfig(4, 16, 8, 4, 6, q_lora_rank=24)
NORMED = dataclasses.replace(PLAIN, window=7, rope_norm=True)
GROWING = dataclasses.replace(PLAIN, query_temperature=QueryTemperatureConfig(0.5, 4))
GROUPED = dataclasses.replace(PLAIN, latent_heads=2)
NOPE = dataclasses.replace(PLAIN, qk_rope_head_dim=0, rope=None)
BOTH = pytest.mark.parametrize("computation", ["absorbed", "expanded"])


def layer(config: LatentAttentionConfig) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    made = MultiHeadLatentAttention.from_config(E, config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.double().eval()


def tokens(B: int, T: int) -> Tensor:
    return torch.randn(
        B, T, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu"
    )


def formula(mine: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """Keys and values of all heads, and heads of attention to them."""
    (B, T, _), c = x.shape, mine.config
    q = mine.q_b_proj(mine.q_a_norm(mine.q_a_proj(x))).view(B, T, 4, -1).transpose(1, 2)
    latent, r = mine.kv_a_proj_with_mqa(x).split([16, c.qk_rope_head_dim], dim=-1)
    made = mine.kv_b_proj(mine.kv_a_norm(latent)).view(B, T, 4, -1).transpose(1, 2)
    k, v = made.split([8, 6], dim=-1)
    if c.rope_norm:
        r = mine.k_rope_norm(r)
    n, p = q.split([8, c.qk_rope_head_dim], dim=-1)
    r = r[:, None]
    if mine.rope is not None:
        p, r = mine.rope.apply(p, 0), mine.rope.apply(r, 0)
    q, k = torch.cat((n, p), dim=-1), torch.cat((k, r.expand(-1, 4, -1, -1)), dim=-1)
    if c.query_temperature is not None:
        periods = torch.arange(T, device="cpu") // c.query_temperature.every
        q = q * (1 + c.query_temperature.scale * torch.log1p(periods.double()))[:, None]
    mask = CAUSAL if c.window is None else CAUSAL & ph.Window(c.window)
    heads = ph.attention(q, k, v, mask=mask, scale=mine.scale, kernel="reference")
    return mine.o_proj(heads.transpose(1, 2).flatten(2))


@torch.no_grad()
@BOTH
@pytest.mark.parametrize(
    "config", [NORMED, NOPE, GROWING], ids=["window and norm", "no rotary key", "temperature"]
)
def test_it_is_attention_to_the_keys_and_values_of_latents(config, computation):
    mine, x = layer(config), tokens(2, 20)
    found = mine(x, mask=CAUSAL, computation=computation)
    torch.testing.assert_close(found, formula(mine, x))
    if config.window is not None:
        alone = mine(x[:, 5:12], computation=computation)  # without a mask the window alone
        wanted = mine(x[:, 5:12], mask=ph.Window(7), computation=computation)
        torch.testing.assert_close(alone, wanted)


def model(config: LatentAttentionConfig) -> Transformer:
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    made = TransformerConfig("decoder", 50, E, 256, (LayerConfig(config, network),) * 2)
    assert TransformerConfig.from_json(made.to_json()) == made
    torch.manual_seed(0)
    return Transformer(made).eval()


def gated(config: LatentAttentionConfig) -> GatedLatentAttentionConfig:
    fields: dict[str, Any] = {
        each.name: getattr(config, each.name) for each in dataclasses.fields(config)
    }
    return GatedLatentAttentionConfig(**fields)


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "kind"),
    # A plan keeps windows in rings, whatever the pages of other layers.
    [
        (NORMED, "auto"),
        (gated(NORMED), "auto"),
        (NOPE, "auto"),
        (NOPE, "paged"),
        (GROWING, "auto"),
        (GROUPED, "auto"),
        (gated(dataclasses.replace(NORMED, latent_heads=4)), "auto"),
    ],
    ids=[
        "plain",
        "gated",
        "no rotary key",
        "no rotary key, in pages",
        "temperature",
        "latent heads",
        "latent heads, gated, in a window",
    ],
)
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(config, kind, tmp_path):
    mine = model(config)
    cache = check_decoding(mine, kind, tmp_path)
    unknown = dict.fromkeys((NORMED, GROWING, GROUPED), "native code does not compute")
    why = unknown | {NOPE: "its keys have no rotary part"}
    assert why.get(config, "modules") in mine.decode_plan(cache).explain()


@torch.no_grad()
@BOTH
@pytest.mark.parametrize("change", [lambda config: config, gated], ids=["plain", "gated"])
def test_latent_heads_are_latents_with_an_up_projection_in_blocks(change, computation):
    config = change(dataclasses.replace(NOPE, norm=None))
    mine, plain = layer(dataclasses.replace(config, latent_heads=2)), layer(config)
    state, x = mine.state_dict(), tokens(2, 20)
    blocks = torch.zeros(4, 14, 16, dtype=torch.float64, device="cpu")
    up = state["kv_b_proj.weight"].view(4, 14, 8)
    blocks[:2, :, :8], blocks[2:, :, 8:] = up[:2], up[2:]
    plain.load_state_dict(state | {"kv_b_proj.weight": blocks.flatten(0, 1)})
    found = mine(x, mask=CAUSAL, computation=computation)
    torch.testing.assert_close(found, plain(x, mask=CAUSAL, computation=computation))


@torch.no_grad()
@BOTH
def test_one_latent_head_is_the_latent(computation):
    mine, x = layer(PLAIN).float(), tokens(2, 20).float()
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    other = MultiHeadLatentAttention(E, 4, q_lora_rank=24, bias=False, latent_heads=1, **sizes)
    other.load_state_dict(mine.state_dict())
    assert other.config == PLAIN
    found = other.eval()(x, mask=CAUSAL, computation=computation)
    assert torch.equal(found, mine(x, mask=CAUSAL, computation=computation))


def test_what_knows_one_latent_head_refuses_more_by_name(tmp_path):
    with pytest.raises(ConfigError, match="must divide num_heads=4 and kv_lora_rank=16: got 3"):
        dataclasses.replace(PLAIN, latent_heads=3)
    with pytest.raises(ConfigError, match=r"latent_heads must divide num_heads=4 .*: got 8"):
        dataclasses.replace(PLAIN, latent_heads=8)
    with pytest.raises(ConfigError, match="one latent head's keys: got latent_heads=2"):
        SparseLatentAttentionConfig(4, 16, 8, 4, 6, q_lora_rank=24, latent_heads=2)
    mine = model(GROUPED)
    for dimension in ("tensor", "context"):
        with pytest.raises(UnsupportedError, match="with latent_heads=2 on the dimension"):
            check_classes(mine, dimension)
        check_classes(model(PLAIN), dimension)
    with pytest.raises(UnsupportedError, match="layer 0 is GLA-2 4 heads"):
        convert(mine, num_kv_heads=2)
    checkpoint = Checkpoint(mine.config, mine, None, "here", family="deepseek_v3")
    with pytest.raises(ConfigError, match=r"cannot say layers\[0\].attention.latent_heads=2"):
        save_checkpoint(checkpoint, tmp_path)


def test_a_gate_of_a_head_multiplies_all_of_its_features():
    sparse = SparseLatentAttentionConfig(
        4, 16, 8, 4, 6, q_lora_rank=24, indexer=IndexerConfig(16, 8, 6), gated=True
    )
    by_head = dataclasses.replace(sparse, gate_per="head")
    torch.manual_seed(0)
    mine = SparseLatentAttention.from_config(E, by_head).double().eval()
    other = SparseLatentAttention.from_config(E, sparse).double().eval()
    state = mine.state_dict()
    state["gate_proj.weight"] = state["gate_proj.weight"].repeat_interleave(6, dim=0)
    other.load_state_dict(state)
    x = tokens(2, 15)
    torch.testing.assert_close(mine(x, mask=CAUSAL), other(x, mask=CAUSAL))
    assert sum(g.count for g in by_head.parameter_groups(E)) == sum(
        p.numel() for p in mine.parameters()
    )
    with pytest.raises(ConfigError, match="gate_per must be"):
        dataclasses.replace(sparse, gate_per="token")
    with pytest.raises(ConfigError, match="queries that choose have no window: got window=5"):
        dataclasses.replace(sparse, window=5)


def test_what_does_not_go_is_refused_by_name():
    with pytest.raises(ConfigError, match="window must be a whole number"):
        dataclasses.replace(PLAIN, window=0)
    for wrong in ({"norm": None}, {"qk_rope_head_dim": 0, "rope": None}):
        with pytest.raises(ConfigError, match="rope_norm needs a norm and a rotary key"):
            dataclasses.replace(PLAIN, rope_norm=True, **wrong)
    for sizes in ({"qk_rope_head_dim": 0}, {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}):
        with pytest.raises(ConfigError, match="a key has features, and rope is over some"):
            dataclasses.replace(PLAIN, **sizes, rope=RopeConfig() if len(sizes) == 1 else None)
