"""What multi-head attention as a layer computes: judged by torch's module and by its own laws."""

from __future__ import annotations

import math

import pytest
import torch
from attention_configs import CONFIGS, built
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polyhead import Causal, DenseCache, Documents, Drop, Keep, KeyLengths, Window
from polyhead.config import RopeConfig
from polyhead.layers import MultiHeadAttention, RoPE


def torch_twin(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's module with the same weights."""
    E, H = layer.embed_dim, layer.num_heads
    bias = layer.q_proj.bias is not None
    twin = nn.MultiheadAttention(
        E, H, bias=bias, batch_first=True, kdim=layer.kdim, vdim=layer.vdim
    ).eval()
    weights = [getattr(layer, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    with torch.no_grad():
        if twin.in_proj_weight is not None:
            twin.in_proj_weight.copy_(torch.cat(weights))
        else:
            for name, weight in zip(("q", "k", "v"), weights, strict=True):
                getattr(twin, f"{name}_proj_weight").copy_(weight)
        if bias:
            biases = [getattr(layer, name).bias for name in ("q_proj", "k_proj", "v_proj")]
            twin.in_proj_bias.copy_(torch.cat(biases))
            twin.out_proj.bias.copy_(layer.o_proj.bias)
        twin.out_proj.weight.copy_(layer.o_proj.weight)
    return twin


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torchs_module(bias, grad):
    layer, x = MultiHeadAttention(32, 4, bias=bias), torch.randn(2, 7, 32)
    with torch.set_grad_enabled(grad):
        want, _ = torch_twin(layer)(x, x, x)
        torch.testing.assert_close(layer(x), want)
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        want, _ = torch_twin(layer)(x, x, x, attn_mask=hidden)
        torch.testing.assert_close(layer(x, mask=Causal()), want)
        padding = torch.tensor([[0] * 7, [0] * 4 + [1] * 3]).bool()
        want, _ = torch_twin(layer)(x, x, x, key_padding_mask=padding)
        torch.testing.assert_close(layer(x, mask=KeyLengths([7, 4])), want)


def test_cross_attention_equals_torchs_module():
    layer = MultiHeadAttention(32, 4, bias=True, kdim=20, vdim=12)
    x, for_k, for_v = torch.randn(2, 5, 32), torch.randn(2, 9, 20), torch.randn(2, 9, 12)
    want, _ = torch_twin(layer)(x, for_k, for_v)
    torch.testing.assert_close(layer(x, (for_k, for_v)), want)
    layer = MultiHeadAttention(32, 4, kdim=20, vdim=20)
    want, _ = torch_twin(layer)(x, for_k, for_k)
    torch.testing.assert_close(layer(x, for_k), want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, for_k), want)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_grouped_heads_equal_full_heads_with_copied_weights(num_kv_heads):
    grouped = MultiHeadAttention(24, 6, num_kv_heads, rope=RoPE())
    full = MultiHeadAttention(24, 6, rope=RoPE())
    state = dict(grouped.state_dict())
    for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        heads = state[name].view(num_kv_heads, 4, -1)
        state[name] = heads.repeat_interleave(6 // num_kv_heads, dim=0).reshape(
            full.state_dict()[name].shape
        )
    full.load_state_dict(state)
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(grouped(x, mask=Causal()), full(x, mask=Causal()))


def by_hand(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """Causal self-attention of one layer, head by head, from the formula."""
    config, (B, T, _) = layer.config, x.shape
    H, G, D, V = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    place = None if config.qk_norm is None else config.qk_norm.place

    def heads(x, proj, norm, count):
        y = proj(x)
        y = norm(y) if place == "full_width" else y
        y = y.view(B, T, count, D).transpose(1, 2)
        y = norm(y) if place == "before_rope" else y
        y = y if config.rope is None else RoPE.from_config(config.rope).apply(y, torch.arange(T))
        return norm(y) if place == "after_rope" else y

    norms = (None, None) if place is None else (layer.q_norm, layer.k_norm)
    q, k = heads(x, layer.q_proj, norms[0], H), heads(x, layer.k_proj, norms[1], G)
    v = layer.v_proj(x).view(B, T, G, V).transpose(1, 2)
    scale = 1 / math.sqrt(D) if config.scale is None else config.scale
    back = torch.arange(T)[:, None] - torch.arange(T)
    visible = (back >= 0) & (back < (config.window or T))
    outs = []
    for h in range(H):
        g = h // (H // G)
        scores = q[:, h] @ k[:, g].mT * scale
        if config.softcap:
            scores = config.softcap * torch.tanh(scores / config.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if config.sinks:
            scores = torch.cat((scores, layer.sinks[h].expand(B, T, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :T]
        outs.append(weights @ v[:, g])
    return layer.o_proj(torch.cat(outs, dim=-1))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_is_its_formula(name, grad):
    layer, x = built(**CONFIGS[name]), torch.randn(2, 11, 24)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x, mask=Causal()), by_hand(layer, x))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_every_parameter(name):
    layer = built(**CONFIGS[name])
    layer(torch.randn(2, 6, 24), mask=Causal()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    cuts=st.sets(st.integers(1, 22)),
    explicit=st.booleans(),
    grad=st.booleans(),
)
def test_any_split_through_the_cache_equals_one_pass(name, cuts, explicit, grad):
    torch.manual_seed(0)
    layer, x = built(**CONFIGS[name]), torch.randn(2, 23, 24)
    positions = torch.arange(23) * 2 if explicit else None
    with torch.set_grad_enabled(grad):
        whole = layer(x, mask=Causal(), positions=positions)
        cache, parts = DenseCache(), []
        ends = [*sorted(cuts), 23]
        for start, stop in zip([0, *ends], ends, strict=False):
            where = None if positions is None else positions[start:stop]
            part = x[:, start:stop]
            parts.append(layer(part, mask=Causal(), positions=where, cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)
    assert cache.length == 23


def test_gradients_flow_through_a_cache():
    layer, x = built(rope=RopeConfig()), torch.randn(1, 9, 24)
    layer(x, mask=Causal()).square().sum().backward()
    want = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    cache = DenseCache()
    parts = [layer(part, mask=Causal(), cache=cache) for part in x.split(4, dim=1)]
    torch.cat(parts, dim=1).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, want[name])


def test_ragged_rows_equal_their_solo_runs():
    layer = built(rope=RopeConfig(), window=4)
    rows = [torch.randn(1, n, 24) for n in (9, 5)]
    padded = torch.full((2, 9, 24), torch.nan)
    padded[0], padded[1, 4:] = rows[0], rows[1]
    # Left padding stands at position 0 and is dropped; real tokens count from 0.
    positions = torch.tensor([[*range(9)], [0] * 4 + [*range(5)]])
    real = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    real[1, ..., :4] = False
    with torch.no_grad():
        out = layer(padded, mask=Causal() & Keep(real), positions=positions)
        for row, x in enumerate(rows):
            torch.testing.assert_close(out[row, -x.shape[1] :], layer(x, mask=Causal())[0])


def test_rows_of_different_lengths_go_on_where_each_ends():
    layer, cache = built(rope=RopeConfig(), window=4), DenseCache()
    rows, later = [torch.randn(1, n, 24) for n in (7, 4)], torch.randn(2, 3, 24)
    padded, real = torch.zeros(2, 7, 24), torch.ones(2, 7, dtype=torch.bool)
    padded[0], padded[1, 3:], real[1, :3] = rows[0], rows[1], False
    with torch.no_grad():
        layer(padded, mask=Causal(), positions=cache.next_positions(real), cache=cache)
        out = layer(later, mask=Causal(), cache=cache)
        for row, x in enumerate(rows):
            whole = layer(torch.cat((x, later[row : row + 1]), dim=1), mask=Causal())
            torch.testing.assert_close(out[row], whole[0, -3:])


def test_a_window_joins_the_mask_it_is_given():
    layer, x = built(window=3), torch.randn(1, 8, 24)
    free = built()
    free.load_state_dict(layer.state_dict())
    documents = Documents([3, 5])
    for mask in (Causal(), documents, Causal() & documents):
        torch.testing.assert_close(layer(x, mask=mask), free(x, mask=mask & Window(3)))
    torch.testing.assert_close(layer(x), free(x, mask=Window(3)))


def test_cross_attention_reads_the_context_once():
    layer, x, context = built(), torch.randn(2, 3, 24), torch.randn(2, 7, 24)
    want, cache = layer(x, context), DenseCache()
    torch.testing.assert_close(layer(x, context, cache=cache), want)
    calls = []
    layer.k_proj.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(layer(x[:, 1:], context, cache=cache), want[:, 1:])
    assert (cache.length, calls) == (7, [])
    with pytest.raises(ValueError, match="holds a context of 7 tokens: got one of 6"):
        layer(x, context[:, 1:], cache=cache)


def test_cross_attention_stands_at_the_positions_it_is_given():
    layer, x, context = built(rope=RopeConfig()), torch.randn(2, 3, 24), torch.randn(2, 4, 24)
    positions, places = torch.tensor([4, 1, 9]), torch.tensor([2, 8, 0, 4])
    have = layer(x, context, mask=Causal(), positions=positions, context_positions=places)
    allowed = places <= positions[:, None]
    want = layer(x, context, mask=Keep(allowed), positions=positions, context_positions=places)
    torch.testing.assert_close(have, want)
    shifted = layer(
        x, context, mask=Causal(), positions=positions + 7, context_positions=places + 7
    )
    torch.testing.assert_close(have, shifted)


def test_dropout_acts_in_training_only():
    layer, x = MultiHeadAttention(16, 4, dropout=0.5), torch.randn(1, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    plain = MultiHeadAttention(16, 4).eval()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))


def test_dropout_keeps_the_expectation():
    layer, x = MultiHeadAttention(16, 4, dropout=0.3), torch.randn(1, 6, 16)
    with torch.no_grad():
        mean = torch.stack([layer(x) for _ in range(600)]).mean(dim=0)
        torch.testing.assert_close(mean, layer.eval()(x), atol=0.05, rtol=0)


def test_keys_and_values_are_not_copied_for_grouped_heads(monkeypatch):
    import polyhead.layers.hooks as module

    seen = []
    original = module.attention
    monkeypatch.setattr(
        module,
        "attention",
        lambda q, source, **kw: seen.append(source) or original(q, source, **kw),
    )
    layer, cache = built(8, 2, rope=RopeConfig()), DenseCache()
    with torch.no_grad():
        layer(torch.randn(1, 5, 24), cache=cache)
        layer(torch.randn(1, 1, 24), cache=cache)
    k, v = seen[-1].gather()
    assert k.shape == (1, 2, 6, 8)
    held_k, held_v = cache.source().gather()
    assert (k.data_ptr(), v.data_ptr()) == (held_k.data_ptr(), held_v.data_ptr())


def test_runs_in_low_precision_and_on_meta():
    layer, x = built(rope=RopeConfig(), sinks=True), torch.randn(1, 5, 24)
    want = layer(x, mask=Causal())
    low = layer.bfloat16()(x.bfloat16(), mask=Causal())
    torch.testing.assert_close(low.float(), want, atol=0.03, rtol=0.03)
    with torch.device("meta"):
        empty = MultiHeadAttention(24, 4, rope=RoPE())
    assert empty.q_proj.weight.is_meta


def test_masks_of_both_polarities_are_understood():
    layer, x = built(), torch.randn(1, 5, 24)
    allowed = torch.rand(5, 5) > 0.4
    torch.testing.assert_close(layer(x, mask=Keep(allowed)), layer(x, mask=Drop(~allowed)))
