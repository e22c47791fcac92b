"""Positions with several coordinates (M-RoPE) in whole models and in layers; parity with
transformers is in ``tests/families/test_wrappers.py``, the angles in ``tests/layers/test_rope.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import DenseCache, StreamingLLM
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ContextLengthError, UnsupportedError
from polyhead.layers import MultiHeadAttention
from polyhead.models import Transformer
from polyhead.semantics import Causal, Window

W, T = 20, 17
ROPE = RopeConfig(50.0, sections=(2, 1, 1))
PLAIN = AttentionConfig(4, 2, 8, rope=ROPE)


def config(*attentions: Any, **fields: Any) -> TransformerConfig:
    layers = [LayerConfig(each, FeedForwardConfig(40)) for each in attentions or (PLAIN, PLAIN)]
    return TransformerConfig("decoder", W, 24, 64, tuple(layers), **{"head": "tied"} | fields)


def model(*attentions: Any, **fields: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config(*attentions, **fields)).eval()


def ids(count: int = T) -> Tensor:
    return torch.randint(0, W, (2, count), generator=torch.Generator().manual_seed(1))


def at(count: int = T, coordinates: int = 3) -> Tensor:
    """Unlike the order of the tokens."""
    made = torch.Generator().manual_seed(2)
    return torch.randint(0, 40, (coordinates, 2, count), generator=made)


def text(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The layers without sections."""
    return tuple(
        replace(each, attention=replace(each.attention, rope=RopeConfig(50.0))) for each in layers
    )


@torch.no_grad()
def test_text_has_the_bits_that_it_has_without_sections() -> None:
    ours = model()
    plain = Transformer(replace(ours.config, layers=text(ours.config.layers))).eval()
    plain.load_state_dict(ours.state_dict())
    caches = ours.new_cache(), plain.new_cache()
    for chunk in ids().split((6, 1, 1, 9), dim=1):
        got, wanted = (m(chunk, cache=c) for m, c in zip((ours, plain), caches, strict=True))
        assert torch.equal(got, wanted)
    assert torch.equal(ours(ids()), plain(ids()))
    places = torch.arange(T).expand(2, T) + 3
    assert torch.equal(ours(ids(), positions=places), plain(ids(), positions=places))
    plans = [str(m.decode_plan(c).explain()) for m, c in zip((ours, plain), caches, strict=True)]
    assert plans[0] == plans[1]


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["auto", "dense", "paged"])
def test_masks_windows_and_caches_go_by_the_order_of_tokens(window: int | None, kind: Any) -> None:
    """Against softmax over the keys behind each query by index, in float64."""
    layer = MultiHeadAttention.from_config(24, replace(PLAIN, window=window)).double().eval()
    x = torch.randn(2, T, 24, dtype=torch.float64)
    q, k, v = layer._project(x, at())
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    back = torch.arange(T)[:, None] - torch.arange(T)
    seen = (back >= 0) & (back < (window or T))
    weights = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    wanted = (weights @ v).transpose(1, 2).reshape(2, T, -1) @ layer.o_proj.weight.mT
    wanted = wanted if layer.o_proj.bias is None else wanted + layer.o_proj.bias
    torch.testing.assert_close(layer(x, mask=Causal(), positions=at()), wanted)
    whole = model(replace(PLAIN, window=window), replace(PLAIN, window=None))
    one_pass, cache = whole(ids(), positions=at()), whole.new_cache(kind=kind)
    chunks = (6, 1, 1, 9)
    parts = [
        whole(part, positions=where, cache=cache)
        for part, where in zip(ids().split(chunks, 1), at().split(chunks, 2), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), one_pass, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_cache_that_holds_coordinates_asks_for_them() -> None:
    ours = model()
    cache = ours.new_cache()
    ours(ids(6), positions=at(6), cache=cache)
    for wrong in (None, torch.arange(6, 7), torch.full((2, 1), 9)):
        for held in (cache, cache.fork()):
            with pytest.raises(ValueError, match=r"at 3 coordinates.* give positions \[3, B, T\]"):
                ours(ids(1), positions=wrong, cache=held)
    with pytest.raises(ValueError, match=r"at 3 coordinates"):
        ours(ids(1).reshape(1, 2), cache=cache, counts=[1, 1])
    with pytest.raises(ValueError, match="3 coordinates each cannot be saved"):
        cache.save("never")
    assert cache.lengths == [6, 6]
    wanted = ours(ids())
    for forget in (cache.reset, lambda: cache.crop(0)):
        forget()
        torch.testing.assert_close(ours(ids(), cache=cache), wanted, atol=2e-5, rtol=1e-4)
        ours(ids(1), cache=cache)
        cache.reset()
        ours(ids(6), positions=at(6), cache=cache)


@torch.no_grad()
def test_rows_of_different_lengths_go_on_by_their_own_order() -> None:
    ours = model()
    cache = ours.new_cache()
    ours(ids(9), positions=at(9), cache=cache)
    cache.rollback([0, 4])
    got = ours(ids(3), positions=at(3) + 5, cache=cache)
    for row, kept in enumerate((9, 5)):
        whole = torch.cat((ids(9)[row, :kept], ids(3)[row]))[None]
        where = torch.cat((at(9)[:, row, :kept], at(3)[:, row] + 5), dim=1)[:, None]
        wanted = ours(whole, positions=where)[:, -3:]
        torch.testing.assert_close(got[row : row + 1], wanted, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_layers_that_rotate_nothing_take_the_tokens_in_order() -> None:
    state = GatedDeltaNetConfig(4, 2, 6, 8, 3)
    ours = model(state, PLAIN, replace(PLAIN, rope=None, window=4))
    cache, chunks = ours.new_cache(), (6, 1, 1, 9)
    parts = [
        ours(part, positions=where, cache=cache)
        for part, where in zip(ids().split(chunks, 1), at().split(chunks, 2), strict=True)
    ]
    wanted = ours(ids(), positions=at())
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, atol=2e-5, rtol=1e-4)
    with ph.batch_invariant():
        whole, cache = ours(ids(), positions=at()), ours.new_cache()
        first = ours(ids(6), positions=at()[..., :6], cache=cache)
    torch.testing.assert_close(whole, wanted, atol=2e-5, rtol=1e-4)
    assert first.shape == (2, 6, W)


LATENT = LatentAttentionConfig(4, 16, 8, 8, 8, rope=ROPE)
REFUSED: dict[str, tuple[Any, dict[str, Any], Any, type[Exception], str]] = {
    "no sections": ([replace(PLAIN, rope=RopeConfig())], {}, at(), ValueError, "has no sections"),
    "two ropes": ([PLAIN, replace(PLAIN, rope=RopeConfig())], {}, at(), ValueError, "no sections"),
    "no rope": ([replace(PLAIN, rope=None)], {}, at(), ValueError, "no layer of this model rot"),
    "four": ([PLAIN], {}, at(T, 4), ValueError, r"must be \[C, B, T\] = \[3, 2, 17\]: got \[4"),
    "fewer": ([PLAIN], {}, at(T - 1), ValueError, r"= \[3, 2, 17\]: got \[3, 2, 16\]"),
    "below 0": ([PLAIN], {}, at() - 1, ValueError, "positions must be at least 0: got -1"),
    "far": ([PLAIN], {}, at() + 40, ContextLengthError, "context is 64 tokens"),
    "not whole": ([PLAIN], {}, at().float(), TypeError, "tensor of whole numbers"),
    "latent": ([LATENT], {}, at(), UnsupportedError, "MLA takes one position for each token"),
    "ALiBi": ([replace(PLAIN, alibi=ALiBiConfig())], {}, at(), UnsupportedError, "alibi reads one"),
    "ALiBi alone": (
        [PLAIN, replace(PLAIN, rope=None, alibi=ALiBiConfig())],
        {},
        at(),
        UnsupportedError,
        "alibi reads one",
    ),
    "temperature of layers that do not rotate": (
        [PLAIN, replace(PLAIN, rope=None, query_temperature=QueryTemperatureConfig(0.1, 4))],
        {},
        at(),
        UnsupportedError,
        "query_temperature reads one",
    ),
    "temperature": (
        [replace(PLAIN, query_temperature=QueryTemperatureConfig(0.1, 4))],
        {},
        at(),
        UnsupportedError,
        "query_temperature reads one",
    ),
    "learned": (
        [PLAIN],
        {"embedding": EmbeddingConfig(positions="learned")},
        at(),
        UnsupportedError,
        "learned or sinusoidal positions of this model reads one",
    ),
    "T5": ([PLAIN], {"relative_bias": RelativeBiasConfig()}, at(), UnsupportedError, "relative_b"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_by_coordinates_is_refused_by_name(name: str) -> None:
    attentions, fields, positions, error, words = REFUSED[name]
    ours = model(*attentions, **fields)
    for cache in (None, ours.new_cache()):
        with pytest.raises(error, match=words):
            ours(ids(), positions=positions, cache=cache)
        assert cache is None or not cache.length


def test_calls_that_have_no_coordinates_refuse_them() -> None:
    ours = model()
    with pytest.raises(UnsupportedError, match="rotates tokens by their places"):
        ours(ids(), positions=at(), cache=ours.new_cache(evicting=StreamingLLM(8, sinks=2)))
    layer, x = ours.layers[0].attention, torch.randn(2, T, 24)
    with pytest.raises(ValueError, match="cross-attention takes no coordinates"):
        layer(x, x, positions=at())
    with pytest.raises(ValueError, match=r"must be \[C, B, T\]"):
        layer(x, positions=at(4), cache=DenseCache())
    assert layer(x, mask=Causal() & Window(4), positions=at()[:, :1]).shape == x.shape
