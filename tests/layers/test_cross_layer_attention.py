"""Keys and values of an earlier layer, values made of keys, and vectors of single layers."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    CrossLayerAttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.conversion import convert
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.interpret.circuits import HeadCircuits
from polyhead.interpret.pruning import prune
from polyhead.interpret.trace.model import trace_model
from polyhead.layers import MultiHeadAttention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, H, G, D, P = 32, 4, 2, 8, 6
NETWORK = FeedForwardConfig(40)
SOURCE = AttentionConfig(
    H, G, D, rope=RopeConfig(), v_norm=NormConfig(weight=False), values_from_keys=True,
    hands_on_keys=True,
)  # fmt: skip
WINDOWED = AttentionConfig(H, G, D, window=5, rope=RopeConfig(theta=50.0), hands_on_keys=True)
READER = CrossLayerAttentionConfig(H, G, D, rope=RopeConfig(), keys_of=0, qk_norm=QKNormConfig())
WINDOWED_READER = CrossLayerAttentionConfig(
    H, G, D, rope=RopeConfig(theta=50.0), keys_of=1, window=5
)


def configuration(*attentions: AttentionConfig, vectors: bool = True) -> TransformerConfig:
    layers = tuple(
        LayerConfig(
            attention,
            NETWORK,
            per_layer_input=PerLayerInputConfig(P) if vectors else None,
            output_scale=vectors,
        )
        for attention in attentions
    )
    made = PerLayerEmbeddingConfig(50, P) if vectors else None
    return TransformerConfig("decoder", 50, E, 256, layers, per_layer_embedding=made)


def model(*attentions: AttentionConfig, vectors: bool = True) -> Transformer:
    torch.manual_seed(0)
    chosen = attentions or (SOURCE, WINDOWED, READER, WINDOWED_READER)
    made = Transformer(configuration(*chosen, vectors=vectors)).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def ids(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, count), generator=torch.Generator().manual_seed(seed))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention ``[B, H, T, D]`` to ``[B, G, T, D]``, by its formula."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    hidden = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
    return ((q @ k.mT) * scale + hidden).softmax(dim=-1) @ v


@torch.no_grad()
def test_it_attends_to_the_keys_and_values_of_the_other_layer():
    plain = replace(SOURCE, rope=None)
    mine = model(plain, replace(READER, rope=None, qk_norm=None, scale=0.3), vectors=False).double()
    seen: list[Tensor] = []
    inner = mine.layers[1].attention
    inner.register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    x = mine.embedding(tokens := ids(2, 13))
    mine(tokens)
    k = mine.layers[0].attention.k_proj(mine.layers[0].attention_norm(x)).view(2, 13, G, D)
    v = k / (k.square().mean(dim=-1, keepdim=True) + plain.v_norm.eps).sqrt()
    q = inner.q_proj(seen[0]).view(2, 13, H, D).transpose(1, 2)
    heads = attend(q, k.transpose(1, 2), v.transpose(1, 2), 0.3)
    wanted = inner.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(seen[1], wanted)
    names = {name for name, _ in inner.named_parameters()}
    assert names == {"q_proj.weight", "o_proj.weight"}


@torch.no_grad()
def test_values_made_of_keys_are_one_projection_used_twice():
    torch.manual_seed(1)
    twice = replace(SOURCE, values_from_keys=False, qkv_bias=True, qk_norm=QKNormConfig())
    one = MultiHeadAttention.from_config(E, replace(twice, values_from_keys=True))
    two = MultiHeadAttention.from_config(E, twice)
    state = one.state_dict()
    state |= {name.replace("k_proj", "v_proj"): t for name, t in state.items() if "k_proj" in name}
    two.load_state_dict(state)
    x, context = torch.randn(2, 7, E), torch.randn(2, 5, E)
    torch.testing.assert_close(one(x, mask=ph.Causal()), two(x, mask=ph.Causal()))
    torch.testing.assert_close(one(x, context), two(x, context))
    with pytest.raises(ConfigError, match="values_from_keys needs values of the keys' size 8"):
        replace(SOURCE, v_head_dim=4)


@torch.no_grad()
def test_vectors_of_layers_are_the_sum_of_a_row_and_a_projection():
    mine = model()
    x = mine.embedding(tokens := ids(2, 9))
    made = mine.per_layer_embedding
    found = made(tokens, x)
    for layer in range(4):
        own = made.tokens.weight[:, layer * P : (layer + 1) * P][tokens] * P**0.5
        projected = x @ made.projection.weight[layer * P : (layer + 1) * P].T * E**-0.5
        wanted = (made.norm(projected) + own) / 2**0.5
        torch.testing.assert_close(found[:, :, layer], wanted)
    part = mine.layers[2].per_layer_input
    handed = ph.layers.handed.Handed(2, {(-1, "per_layer_input"): found})
    gate = torch.nn.functional.gelu(part.gate_proj(x), approximate="tanh")
    torch.testing.assert_close(part(x, handed), x + part.norm(part.o_proj(gate * found[:, :, 2])))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "dense", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(kind, tmp_path):
    mine, tokens = model(), ids(2, 40)
    whole = mine(tokens)
    # One row is sensitive: both ways are up to 2e-5 from float64 there.
    close = partial(torch.testing.assert_close, atol=5e-5, rtol=1e-5)
    cache = mine.new_cache(kind=kind, spare=4)
    chunks = tokens.split([11, 1, 1, 9, 1, 17], dim=1)
    found = [mine(chunk, cache=cache) for chunk in chunks]
    close(torch.cat(found, dim=1), whole)
    assert [layer.bytes > 0 for layer in cache.layers] == [True, True, False, False]
    if kind == "auto":
        exact = mine.new_cache(capacity=40)
        mine(tokens, cache=exact)
        planned = ph.plan(mine.config, tokens=40, batch_size=2, dtype="float32").cache_bytes
        assert planned == exact.bytes
    cache.save(tmp_path / "cache.safetensors")
    other = mine.new_cache(kind=kind, spare=4)
    other.load(tmp_path / "cache.safetensors")
    for each in (cache, other, cache.fork()):
        each.rollback(3)
        again = mine(tokens[:, -3:], cache=each)
        close(again, whole[:, -3:])
    cache.reorder([1, 1, 0])
    cache.rollback([1, 4, 2])  # rows of different lengths
    rows = torch.stack((tokens[1], tokens[1], tokens[0]))
    step = mine(rows.gather(1, torch.tensor([[39], [36], [38]])), cache=cache)
    wanted = torch.stack((whole[1, 39], whole[1, 36], whole[0, 38]))
    close(step[:, 0], wanted)


def test_a_plan_reads_the_keys_of_the_other_layer_and_keeps_them_once():
    own = configuration(WINDOWED, replace(WINDOWED, hands_on_keys=False), vectors=False)
    shared = configuration(WINDOWED, replace(WINDOWED_READER, keys_of=0), vectors=False)
    given: dict[str, Any] = {"tokens": 100, "batch_size": 3, "bandwidth": 1e9}
    two, one = ph.plan(own, **given), ph.plan(shared, **given)
    assert one.cache_bytes * 2 == two.cache_bytes
    assert one.decode_cache_bytes == two.decode_cache_bytes
    assert two.parameters.total - one.parameters.total == 2 * G * D * E


def test_threads_copies_and_recomputation_read_their_own_call():
    mine = model()
    texts = [ids(1, 12 + i, i) for i in range(16)]
    other = copy.deepcopy(mine)
    with torch.no_grad():
        wanted = [mine(text) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: torch.no_grad()(mine)(text), texts * 4))
        for got, want in zip(found, wanted * 4, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        assert torch.equal(other(texts[3]), wanted[3])
    gradients = []
    for recompute in (False, True):
        mine.recompute = recompute
        mine.zero_grad()
        mine(texts[5]).square().sum().backward()
        gradients.append([p.grad for p in mine.parameters()])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("attentions", "message"),
    [
        ((READER,), "layer 0 reads the keys of layer 0, which must come before it"),
        ((replace(SOURCE, hands_on_keys=False), READER), "hand on its keys"),
        ((SOURCE, replace(READER, num_kv_heads=1)), r"layer 1: keys_of needs a layer with 1 kv"),
        ((WINDOWED, READER), "sees no fewer keys: layer 0 sees"),
        ((WINDOWED, replace(READER, window=6)), "sees no fewer keys: layer 0 sees"),
        ((replace(SOURCE, chunk=8), READER), "sees no fewer keys: layer 0 sees"),
    ],
)
def test_a_layer_reads_keys_of_earlier_layers_that_fit(attentions, message):
    with pytest.raises(ConfigError, match=message):
        configuration(*attentions)
    assert configuration(WINDOWED, replace(READER, window=4))
    assert configuration(SOURCE, replace(READER, window=4))


def test_what_does_not_go_is_refused_by_name():
    mine, x = model(), torch.randn(1, 3, E)
    for layer, what in ((0, "per_layer_input of the embedding"), (2, "keys of layer 0")):
        with pytest.raises(ValueError, match=f"reads the {what}: call it within its model"):
            mine.layers[layer](x)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine.layers[2].attention(x, cache=ph.DenseCache())
    with pytest.raises(ValueError, match="reads the keys of another layer: got a context"):
        mine.layers[2].attention(x, x)
    with pytest.raises(ConfigError, match="has no v_norm"):
        replace(READER, v_norm=NormConfig())
    with pytest.raises(ConfigError, match="per_layer_input of 6 features, which per_layer_emb"):
        replace(mine.config, per_layer_embedding=None)
    with pytest.raises(ConfigError, match="need parallel=None"):
        replace(mine.config.layers[0], parallel="one norm")
    for refused, what in ((mine, "PerLayerEmbedding"), (model(vectors=False), "CrossLayerAtt")):
        with pytest.raises(UnsupportedError, match=what):
            check_classes(refused, "context")
    for asked in (
        lambda: HeadCircuits(mine, 0),
        lambda: prune(mine, {0: [1]}),
        lambda: convert(mine, num_kv_heads=1),
        lambda: trace_model(mine, [1, 2, 3], 0, 0),
    ):
        with pytest.raises((UnsupportedError, ValueError), match=r"v_proj alone makes"):
            asked()
    with pytest.raises(UnsupportedError, match="hands its keys on"):
        prune(model(WINDOWED, replace(WINDOWED_READER, keys_of=0), vectors=False), {0: [0, 1]})
    with torch.no_grad():
        mine(ids(1, 1), cache=(cache := mine.new_cache()))
    said = mine.decode_plan(cache).explain()
    assert "native code does not compute LayerConfig with per_layer_input=" in said
