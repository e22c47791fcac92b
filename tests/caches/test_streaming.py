"""StreamingLLM: the first and the last tokens, at their places in the cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import EvictingCache, StreamingLLM
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, ContextLengthError, UnsupportedError
from polyhead.layers import MultiHeadAttention
from polyhead.semantics import alibi_slopes

E, H, G, D, T = 32, 4, 2, 8, 48
X = torch.randn(2, T, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
CHUNKS = [[1] * T, [30, 1, 1, 5, 11], [7, 20, 1, 20]]
HEADS = AttentionConfig(H, G, D, rope=RopeConfig())
KINDS = {
    "rotary": HEADS,
    "part of a head": replace(HEADS, rope=RopeConfig(dim=4)),
    "long": replace(HEADS, rope=RopeConfig(type="yarn", factor=4.0, original_max_positions=16)),
    "normalized": replace(
        HEADS, qk_norm=QKNormConfig(), query_temperature=QueryTemperatureConfig(0.5, 4)
    ),
    "tied": replace(HEADS, values_from_keys=True),
    "sinks, softcap": replace(HEADS, sinks=True, softcap=20.0),
    "ALiBi": replace(HEADS, rope=None, alibi=ALiBiConfig()),
    "no positions": replace(HEADS, rope=None),
}


def layer(config: AttentionConfig) -> MultiHeadAttention:
    torch.manual_seed(1)
    made = MultiHeadAttention.from_config(E, config)
    if made.sinks is not None:
        torch.nn.init.normal_(made.sinks)
    return made.double().eval()


def streamed(
    attn: MultiHeadAttention, x: Tensor, chunks: list[int], layout: StreamingLLM
) -> Tensor:
    """``[1, T, E]`` of one row, a query at a time from what the paper's cache holds.

    Every query and the keys that it sees are projected anew, at their places in the cache.
    """
    held, first, outs = [], 0, []
    for count in chunks:
        for t in range(first, first + count):
            seen = [*held, *range(first, t + 1)]
            q, k, v = attn._project(x[:, seen], 0)
            scores = q[0, :, -1:] @ k[0].repeat_interleave(H // G, 0).mT * attn.scale
            if attn.config.alibi is not None:
                ago = torch.arange(len(seen) - 1, -1, -1)
                scores = scores - alibi_slopes(H)[:, None, None].double() * ago
            if attn.softcap:
                scores = torch.tanh(scores / attn.softcap) * attn.softcap
            if attn.sinks is not None:
                scores = torch.cat((scores, attn.sinks.detach()[:, None, None]), dim=-1)
            weights = scores.softmax(-1)[..., : len(seen)]
            outs.append((weights @ v[0].repeat_interleave(H // G, 0)).flatten())
        first += count
        held = [*held, *range(first - count, first)]
        if len(held) > layout.budget:
            held = held[: layout.sinks] + held[len(held) - layout.budget + layout.sinks :]
    return torch.nn.functional.linear(torch.stack(outs)[None], attn.o_proj.weight, attn.o_proj.bias)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_keys_stand_at_their_places_in_the_cache_after_every_call(kind, chunks):
    attn = layer(KINDS[kind])
    for layout in (StreamingLLM(12), StreamingLLM(9, sinks=0), StreamingLLM(6, sinks=5)):
        cache, found, length = EvictingCache(layout), [], 0
        for x in X.split(chunks, dim=1):
            found.append(attn(x, mask=ph.Causal(), cache=cache))
            length += x.shape[1]
            last = range(max(0, length - layout.last_tokens), length)
            wanted = sorted({*range(min(layout.sinks, length)), *last})
            assert all(sorted(head.tolist()) == wanted for row in cache.positions for head in row)
        wanted = torch.cat([streamed(attn, x[None], chunks, layout) for x in X])
        torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-5, rtol=1e-5)
        assert cache.lengths == [T, T]
        assert cache.evicted == [T - layout.budget] * 2


@pytest.mark.parametrize("kernel", ["tiled", "reference", "native"])
@torch.no_grad()
def test_every_kernel_reads_what_is_held(kernel):
    attn, cache = layer(KINDS["rotary"]).float(), EvictingCache(StreamingLLM(12))
    pieces = X.float().split([30, 1, 1, 16], dim=1)
    found = [attn(x, mask=ph.Causal(), cache=cache, kernel=kernel) for x in pieces]
    exact = layer(KINDS["rotary"])
    wanted = torch.cat([streamed(exact, x[None], [30, 1, 1, 16], cache.layout) for x in X])
    torch.testing.assert_close(torch.cat(found, dim=1).double(), wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_relative_bias_goes_by_distances_in_the_cache():
    attn, layout = layer(KINDS["no positions"]), StreamingLLM(12)
    table = torch.randn(8, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    bias = ph.RelativeBias(table, bidirectional=False, max_distance=10)
    cache = EvictingCache(layout)
    for x in X.split(1, dim=1):
        found = attn(x, mask=ph.Causal(), cache=cache, bias=bias)
    seen = torch.cat((X[:, :4], X[:, T - 9 :]), dim=1)  # 12 that were held, and the last
    q, k, v = attn._project(seen, 0)
    wanted = ph.attention(q, k, v, mask=ph.Causal(), bias=bias)[:, :, -1:]
    wanted = attn.o_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_a_long_text_is_read_as_exactly_as_a_short_one():
    """Positions themselves never enter an angle: after 2³⁰ tokens float32 would have lost them."""
    attn, layout = layer(KINDS["rotary"]).float(), StreamingLLM(12)
    cache = EvictingCache(layout)
    x = X.float().repeat(1, 3, 1)
    for part in x.split(1, dim=1):
        attn(part, mask=ph.Causal(), cache=cache)
    tensors, facts = cache.state()
    far = EvictingCache(layout)
    shift = 1 << 30
    positions = tensors["tokens.positions"]
    later = tensors | {"tokens.positions": torch.where(positions < 4, positions, positions + shift)}
    lengths = {name: [n + shift for n in facts[name]] for name in ("lengths", "settled")}
    far.restore(later, facts | lengths, torch.device("cpu"))
    for part in X[:, :7].float().split([1, 1, 5], dim=1):
        wanted = attn(part, mask=ph.Causal(), cache=cache)
        assert torch.equal(attn(part, mask=ph.Causal(), cache=far), wanted)


def config_of(attention: AttentionConfig, max_positions=512, **options) -> TransformerConfig:
    layers = (LayerConfig(attention, FeedForwardConfig(64)),) * 2
    return TransformerConfig("decoder", 50, E, max_positions, layers, **options)


@torch.no_grad()
def test_a_text_may_be_longer_than_the_context_by_what_was_evicted():
    torch.manual_seed(3)
    model = ph.Transformer(config_of(HEADS, max_positions=20)).eval()
    ids = torch.randint(50, (2, 100), generator=torch.Generator().manual_seed(4))
    cache, longer = model.new_cache(evicting=StreamingLLM(12)), ph.Transformer(config_of(HEADS))
    longer.load_state_dict(model.state_dict())
    other = longer.eval().new_cache(evicting=StreamingLLM(12))
    for part in ids.split([15, *[1] * 40, 8, *[1] * 37], dim=1):
        assert torch.equal(model(part, cache=cache), longer(part, cache=other))
    assert cache.lengths == [100, 100]
    with pytest.raises(ContextLengthError, match=r"context is 108 tokens.* got position 108"):
        model(ids[:, :9], cache=cache)
    dense = model.new_cache()
    model(ids[:, :15], cache=dense)
    with pytest.raises(ContextLengthError, match="context is 20 tokens"):
        model(ids[:, :9], cache=dense)


@pytest.mark.parametrize(
    ("attention", "options", "words"),
    [
        (HEADS, {"embedding": EmbeddingConfig(positions="learned")}, "learned positions of tokens"),
        (replace(HEADS, qk_norm=QKNormConfig(place="after_rope")), {}, "normalized after that"),
    ],
    ids=["learned", "norm"],
)
def test_what_has_positions_of_another_kind_is_refused_by_name(attention, options, words):
    with pytest.raises(ConfigError, match=words):
        ph.Transformer(config_of(attention, **options)).new_cache(evicting=StreamingLLM(8))
    with pytest.raises(ConfigError, match=words):
        ph.plan(config_of(attention, **options), tokens=8, evicting=StreamingLLM(8))


@torch.no_grad()
def test_models_of_biases_by_distance_stream_and_others_masks_are_refused():
    ids = torch.randint(50, (2, 60), generator=torch.Generator().manual_seed(4))
    alibi = config_of(replace(HEADS, rope=None, alibi=ALiBiConfig()))
    relative = config_of(replace(HEADS, rope=None), relative_bias=RelativeBiasConfig(8, 32))
    for config in (alibi, relative):
        model = ph.Transformer(config).eval()
        cache, dense = model.new_cache(evicting=StreamingLLM(60)), model.new_cache()
        parts = ids.split([40, 1, 19], dim=1)
        for part in parts:
            torch.testing.assert_close(model(part, cache=cache), model(part, cache=dense))
    attn, cache = layer(KINDS["rotary"]), EvictingCache(StreamingLLM(8))
    attn(X[:, :9], mask=ph.Causal(), cache=cache)
    for options in ({"mask": ph.Window(4) & ph.Causal()}, {"bias": torch.zeros(2, H, 1, 9)}):
        with pytest.raises(
            UnsupportedError, match="or one by distance, since positions are places"
        ):
            attn(X[:, 9:10], cache=cache, **options)
        assert cache.lengths == [9, 9]
