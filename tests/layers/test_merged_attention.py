"""Self- and cross-attention in one softmax, against a formula over keys side by side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from whole_models import check_decoding

import polyhead as ph
from allocations import measured
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MergedAttention,
    MergedAttentionConfig,
    QKNormConfig,
    RopeConfig,
    TransformerLayer,
)
from polyhead.models.transformer import Transformer
from polyhead.planning.flops import flops
from polyhead.semantics import KeyLengths

E, T, S = 24, 13, 7
LENGTHS = torch.tensor([S, 4])
CONFIGS = {
    "plain": MergedAttentionConfig(4, 2, 6),
    "rotated": MergedAttentionConfig(4, 4, 6, rope=RopeConfig(50.0), qk_norm=QKNormConfig()),
    "window": MergedAttentionConfig(4, 1, 6, window=3, rope=RopeConfig(50.0), softcap=2.0),
    "one key": MergedAttentionConfig(4, 2, 6, v_head_dim=4, window=1, qkv_bias=True, scale=0.7),
}
each_config = pytest.mark.parametrize("name", CONFIGS)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(name: str) -> MergedAttention:
    torch.manual_seed(1)
    made = MergedAttention.from_config(E, CONFIGS[name]).double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def formula(layer: MergedAttention, x: Tensor, context: Tensor, bias: Tensor) -> Tensor:
    """One softmax over keys and values side by side, and a mask of T × (T + S)."""
    config, H = layer.config, layer.num_heads

    def heads(x: Tensor, name: str, *, turned: bool) -> Tensor:
        made = getattr(layer, f"{name}_proj")(x)
        made = made.unflatten(2, (H if name == "q" else layer.num_kv_heads, -1))
        if config.qk_norm is not None and name != "v":
            made = getattr(layer, f"{name}_norm")(made)
        if turned and layer.rope is not None:
            made = layer.rope.apply(made, 0, head_axis=2)
        return made.transpose(1, 2)

    q = heads(x, "q", turned=True)
    k, v = (
        torch.cat((heads(x, name, turned=name == "k"), heads(context, name, turned=False)), dim=2)
        for name in ("k", "v")
    )
    k, v = (each.repeat_interleave(H // each.shape[1], dim=1) for each in (k, v))
    scores = q @ k.mT * layer.scale
    if config.softcap is not None:
        scores = torch.tanh(scores / config.softcap) * config.softcap
    scores = scores + F.pad(bias, (0, S))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    own = (behind >= 0) & (behind < (config.window or T))
    real = torch.arange(S) < LENGTHS[:, None]
    seen = torch.cat((own.expand(2, 1, T, T), real[:, None, None].expand(2, 1, T, S)), dim=3)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))


@each_config
def test_outputs_and_gradients_are_those_of_keys_side_by_side(name: str) -> None:
    layer, found = layer_of(name), []
    for call in (
        lambda *given, bias: layer(*given, bias=bias, context_mask=KeyLengths(LENGTHS)),
        lambda *given, bias: formula(layer, *given, bias),
    ):
        layer.zero_grad()
        x, context = (drawn(2, n, E, seed=n).requires_grad_() for n in (T, S))
        bias = drawn(2, 4, T, T, seed=2).requires_grad_()
        out = call(x, context, bias=bias)
        (out * drawn(2, T, E)).sum().backward()
        found.append([out, x.grad, context.grad, bias.grad, *(p.grad for p in layer.parameters())])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@each_config
@torch.no_grad()
def test_chunks_through_caches_and_beams_that_share_a_context_equal_one_pass(name: str) -> None:
    layer, config = layer_of(name), CONFIGS[name]
    x, context = drawn(6, T, E), drawn(2, S, E, seed=3)
    mask = KeyLengths(LENGTHS)
    repeated = KeyLengths(LENGTHS.repeat_interleave(3))
    whole = layer(x, context.repeat_interleave(3, dim=0), context_mask=repeated)
    own: Any = ph.DenseCache() if config.window is None else ph.RingCache(config.window)
    beside = ph.DenseCache()
    layer(x[::3, :1], context, context_mask=mask, context_cache=beside)  # fills it
    given: dict[str, Any] = {"context_mask": mask, "cache": own, "context_cache": beside}
    parts = [layer(part, context, **given) for part in x[:, :9].split([5, 1, 3], dim=1)]
    rows = [2, 0, 0, 5, 4, 5]  # within their sentences
    own.reorder(rows)
    parts = [each[rows] for each in parts]
    parts += [layer(part, context, **given) for part in x[rows, 9:].split([1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[rows], atol=1e-10, rtol=1e-10)
    with pytest.raises(ValueError, match="a multiple of its 2: got 3 rows"):
        layer(x[:3], context, context_cache=beside)


@each_config
@torch.no_grad()
def test_rows_that_hold_different_numbers_of_tokens_go_on_as_each_alone(name: str) -> None:
    layer, x, context = layer_of(name), drawn(2, T, E), drawn(2, S, E, seed=3)
    more, cache = drawn(2, 3, E, seed=4), ph.DenseCache()
    layer(x, context, cache=cache)
    cache.rollback([0, 4])
    found = layer(more, context, cache=cache)
    for row, length in enumerate((T, T - 4)):
        text = torch.cat((x[row, :length], more[row]))[None]
        alone = layer(text, context[row : row + 1])[:, -3:]
        torch.testing.assert_close(found[row : row + 1], alone, atol=1e-10, rtol=1e-10)


def model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    heads = dataclasses.replace(CONFIGS["rotated"], num_kv_heads=2, **changes)
    own = LayerConfig(AttentionConfig(4, 2, 6), FeedForwardConfig(20))
    layers = (
        LayerConfig(heads, FeedForwardConfig(20)),
        LayerConfig(dataclasses.replace(heads, window=5), FeedForwardConfig(20)),
    )
    return Transformer(TransformerConfig("encoder-decoder", 50, E, 64, layers, (own,))).eval()


@pytest.mark.parametrize("kind", ["auto", "paged"])
@torch.no_grad()
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(
    kind: Any, tmp_path: Path
) -> None:
    check_decoding(model(), kind, tmp_path)


@torch.no_grad()
def test_operations_are_those_that_run() -> None:
    made = model(window=None)
    token, source = torch.ones(3, 1, dtype=torch.int64), torch.ones(3, S, dtype=torch.int64)
    cache = made.new_cache()
    for cached, given in ((0, {"encoder_ids": source}), (1, {})):
        with FlopCounterMode(display=False) as counter:
            made(token, cache=cache, kernel="reference", **given)
        planned = flops(made.config, queries=1, cached=cached, batch_size=3, context=S)
        assert planned.model == counter.get_total_flops()


@torch.inference_mode()
def test_a_prefill_allocates_no_more_than_is_planned() -> None:
    heads = MergedAttentionConfig(16, 4, 64, rope=RopeConfig(), qk_norm=QKNormConfig())
    small = LayerConfig(AttentionConfig(1, 1, 8), FeedForwardConfig(8))
    layer = LayerConfig(heads, FeedForwardConfig(8))
    config = TransformerConfig("encoder-decoder", 50, 256, 1024, (layer,), (small,))
    made = Transformer(config).eval()
    ids, context = torch.ones(1, 512, dtype=torch.int64), torch.randn(1, 512, 256)
    made(ids, encoder_hidden=context, cache=made.new_cache())
    cache = made.new_cache(capacity=512)
    most, _ = measured(lambda: made(ids, encoder_hidden=context, cache=cache, last=1))
    planned = ph.plan(config, tokens=512, dtype="float32").activation_bytes
    held = cache.cross[0].bytes  # allocated in the call
    assert 0.6 * planned < most - held <= planned


@torch.no_grad()
def test_hooks_are_shown_the_weights_of_both_in_one_row() -> None:
    made = model()
    ids, source = torch.ones(2, T, dtype=torch.int64), torch.ones(2, S, dtype=torch.int64)
    with ph.probe(made) as seen:
        made(ids, encoder_ids=source, encoder_mask=KeyLengths(LENGTHS))
    weights = seen.decoder[1].rows()
    assert weights.shape == (2, 4, T, T + S)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, T))
    assert (weights[1, ..., T + 4 :] == 0).all()
    assert (weights[..., T : T + 4] > 0).all()
    assert (weights[:, :, 9, :5] == 0).all()  # behind the window


@torch.no_grad()
def test_hooks_see_a_shared_context_in_every_row() -> None:
    layer, beside = layer_of("plain"), ph.DenseCache()
    x, context = drawn(6, T, E), drawn(2, S, E, seed=3)
    layer(x[::3], context, context_cache=beside)
    records: list[Any] = []
    with layer.register_attention_hook(records.append):
        layer(x, context, context_mask=KeyLengths(LENGTHS), context_cache=beside)
        repeated = KeyLengths(LENGTHS.repeat_interleave(3))
        layer(x, context.repeat_interleave(3, dim=0), context_mask=repeated)
    found, wanted = (
        (each.k, each.v, each.lse, each.mask.visible(each.q_tokens, each.kv_tokens, x.device))
        for each in records
    )
    for got, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, other, atol=1e-10, rtol=1e-10)


def test_what_it_cannot_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="merged heads go without sinks: got True"):
        MergedAttentionConfig(4, 2, 6, sinks=True)
    with pytest.raises(ConfigError, match="without window_ahead: got 2"):
        MergedAttentionConfig(4, 2, 6, window=3, window_ahead=2)
    heads = CONFIGS["plain"]
    with pytest.raises(ConfigError, match="goes without cross_attention"):
        LayerConfig(heads, FeedForwardConfig(8), cross_attention=AttentionConfig(4, 2, 6))
    layer = TransformerLayer.from_config(E, LayerConfig(heads, FeedForwardConfig(8)))
    with pytest.raises(ValueError, match="needs a context: got none"):
        layer(torch.zeros(1, 3, E))
    with pytest.raises(ValueError, match=r"context must be \[B=1, S, kdim=24\]: got \[1, 3, 8\]"):
        layer(torch.zeros(1, 3, E), torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="needs a context: got none"):
        layer.attention(torch.zeros(1, 3, E))
