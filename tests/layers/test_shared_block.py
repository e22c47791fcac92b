"""A mixer behind a block of attention and network whose weights several layers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import polyhead as ph
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.families import families
from polyhead.layers import (
    FeedForwardConfig,
    LayerConfig,
    Mamba2Config,
    MambaConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    SharedBlock,
    SharedBlockConfig,
)
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, CAUSAL = 16, ph.Causal()
BLOCK = SharedBlockConfig(
    4, 2, 8, rope=RopeConfig(), scale=0.5, norm=NormConfig(eps=0.01),
    mixer=Mamba2Config(4, 2, 8, 6), network=FeedForwardConfig(20), adapter_rank=3,
    head_adapters=True,
)  # fmt: skip


def hybrid(**options: Any) -> LayerConfig:
    return LayerConfig(replace(BLOCK, **options), None, attention_norm=False)


def model(*layers: LayerConfig) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig("decoder", 50, E, 256, layers)
    assert TransformerConfig.from_json(config.to_json()) == config
    made = Transformer(config).eval()
    for tensor in made.parameters():
        torch.nn.init.normal_(tensor, mean=float(tensor.ndim == 1), std=0.3)
    return made


def shared() -> Transformer:
    plain = LayerConfig(BLOCK.mixer, None)
    return model(hybrid(), plain, hybrid(block_of=0), hybrid(), hybrid(block_of=3))


def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 90), generator=torch.Generator().manual_seed(1))


def block_of(layer: Any, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """The formula of the module, in plain torch."""
    n = layer.block_norm(torch.cat((x, embedded), dim=-1))
    q, k, v = (
        (F.linear(n, getattr(layer, f"{name}_proj").weight) + adapter["up"](adapter["down"](n)))
        .unflatten(-1, (-1, 8))
        .transpose(1, 2)
        for name in "qkv"
        for adapter in (layer.adapters[f"{name}_proj"],)
    )
    q, k = layer.rope.apply(q, 0), layer.rope.apply(k, 0)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    m = layer.feed_forward_norm(layer.o_proj(heads.transpose(1, 2).flatten(2)))
    adapter, network = layer.adapters["feed_forward"], layer.feed_forward
    gate, up = adapter["up"](adapter["down"](m)).chunk(2, dim=-1)
    made = network.down_proj(F.silu(network.gate_proj(m) + gate) * (network.up_proj(m) + up))
    return layer.out_proj(made)


def test_a_mixer_reads_the_stream_and_a_block_of_stream_and_embedding():
    mine, tokens = shared().double(), ids()  # rounding grows from mixer to mixer
    with torch.no_grad():
        x = embedded = mine.embedding(tokens, 0)
        for layer in mine.layers:
            mixed = layer.attention
            if isinstance(mixed, SharedBlock):
                read = mixed.mixer_norm(x + block_of(mixed, x, embedded))
                x = x + mixed.mixer(read, mask=CAUSAL)
            else:
                x = x + mixed(layer.attention_norm(x), mask=CAUSAL)
        want = mine.logits(mine.final_norm(x))
        torch.testing.assert_close(mine(tokens), want, atol=1e-12, rtol=0)


def test_every_use_of_a_block_has_a_cache_of_its_own():
    mine, tokens = shared(), ids()
    with torch.no_grad():
        want, cache = mine(tokens), mine.new_cache(spare=1)
        steps = [mine(part, cache=cache) for part in tokens.split([70, 1, 4, 15], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), want, atol=1e-4, rtol=1e-4)
        cache.rollback(1)
        again = mine(tokens[:, -1:], cache=cache)
        torch.testing.assert_close(again, want[:, -1:], atol=1e-4, rtol=1e-4)
        # Rows of different lengths, as serving packs them.
        cache, positions = (
            mine.new_cache(),
            torch.arange(90).expand(2, 90) - torch.tensor([[0], [9]]),
        )
        row = torch.cat((tokens[1:, :9], tokens[1:, :-9]), dim=1)
        mine(torch.cat((tokens[:1], row)), cache=cache, positions=positions)
        more = mine(torch.cat((tokens[0, :2], tokens[1, 81:84]))[None], cache=cache, counts=[2, 3])
        torch.testing.assert_close(more[0, 2:], want[1, 81:84], atol=1e-4, rtol=1e-4)


def test_shared_weights_are_held_and_counted_once():
    mine = shared()
    names = {name for name in mine.state_dict() if name.startswith("layers.2.")}
    assert not any("q_proj.weight" in n and "adapters" not in n for n in names)
    assert {n.split(".")[3] for n in names} == {"adapters", "mixer", "mixer_norm", "out_proj"}
    first, second = mine.layers[0].attention, mine.layers[2].attention
    assert first.q_proj is second.q_proj
    assert first.feed_forward.up_proj is second.feed_forward.up_proj
    assert first.out_proj is not second.out_proj
    assert first.q_proj is not mine.layers[3].attention.q_proj
    assert mine.parameter_counts().total == sum(p.numel() for p in mine.parameters())
    plan = ph.plan(mine.config, tokens=8)
    assert plan.parameters == mine.parameter_counts()
    own = replace(mine.config, layers=(*mine.config.layers[:2], hybrid(), *mine.config.layers[3:]))
    # A use multiplies by the block's weights whether they are another layer's or its own.
    assert ph.plan(own, tokens=8).prefill.model == plan.prefill.model
    other = Transformer(mine.config)
    other.load_state_dict(mine.state_dict())
    assert torch.equal(other(ids()), mine(ids()))


def test_what_a_shared_block_refuses():
    with pytest.raises(ConfigError, match="layer 1 has the block_norm of layer 1"):
        model(hybrid(), hybrid(block_of=1))
    with pytest.raises(ConfigError, match="must come before it and have its own"):
        model(hybrid(), hybrid(block_of=0), hybrid(block_of=1))
    with pytest.raises(ConfigError, match="a block of the same sizes: layer 0 is"):
        model(hybrid(), hybrid(block_of=0, scale=0.6))
    with pytest.raises(ConfigError, match="a block of the same sizes: layer 0 is"):
        model(LayerConfig(BLOCK.mixer, None), hybrid(block_of=0))
    model(hybrid(), hybrid(block_of=0, mixer=MambaConfig(8, 4, 2), head_adapters=False))
    with pytest.raises(ConfigError, match="mixer must be Mamba or Mamba-2: got a SharedBlock"):
        replace(BLOCK, mixer=BLOCK)
    with pytest.raises(ConfigError, match="head_adapters need an adapter_rank"):
        replace(BLOCK, adapter_rank=None)
    with pytest.raises(ConfigError, match="no norms of heads and no sinks"):
        replace(BLOCK, qk_norm=QKNormConfig())
    with pytest.raises(ConfigError, match="a gated network, without dropout"):
        replace(BLOCK, network=FeedForwardConfig(20, gated=False))
    with pytest.raises(ConfigError, match="a projection of values and keys for itself"):
        replace(BLOCK, hands_on_keys=True)
    mine, x = model(hybrid()), torch.zeros(1, 3, E)
    with pytest.raises(ValueError, match="reads the embedded of the embedding: call it within"):
        mine.layers[0].attention(x, mask=CAUSAL)
    with pytest.raises(UnsupportedError, match="takes x, mask and cache: got a context"):
        mine.layers[0].attention(x, x)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 16\]: got \[1, 3, 8\]"):
        mine.layers[0].attention(x[..., :8])
    with pytest.raises(UnsupportedError, match="SharedBlock"):
        check_classes(mine, "context")


def test_a_file_of_zamba_may_hold_the_block_in_every_layer_that_uses_it():
    table = families()["zamba"].tensors_of({"num_hidden_layers": 9})
    found = {
        table.our_name(f"model.layers.{i}.shared_transf.self_attn.q_proj.weight") for i in (2, 7)
    }
    assert found == {"layers.2.attention.q_proj.weight"}
    assert table.our_name("model.layers.7.linear.weight") == "layers.7.attention.out_proj.weight"
