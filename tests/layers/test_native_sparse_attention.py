"""Native sparse attention: the paper's formula, every cache, models, plans."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from whole_models import check_decoding, check_fork, check_padded_rows

import polyhead as ph
from polyhead.caches import LayerCache, Quantized
from polyhead.caches.sizes import Dense, Layout, Paged
from polyhead.config import (
    FeedForwardConfig,
    LayerConfig,
    NativeSparseAttentionConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import NativeSparseAttention
from polyhead.layers.native_sparse_attention import BlockCompression
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes
from polyhead.planning.flops import attention_flops

E, H, G, D, V = 32, 4, 2, 8, 4
CAUSAL = ph.Causal()
SIZES: dict[str, dict[str, Any]] = {
    "half overlapping": {
        "block_size": 4, "stride": 2, "selected_size": 4, "top_k": 4, "last_keys": 5,
    },
    "apart": {
        "block_size": 2, "stride": 2, "selected_size": 6, "top_k": 3, "last_keys": 3,
        "first_blocks": 0, "last_blocks": 1, "compression_dim": 5,
    },
    "quarter overlapping": {
        "block_size": 8, "stride": 2, "selected_size": 8, "top_k": 3, "last_keys": 40,
        "last_blocks": 1, "qk_norm": QKNormConfig(), "v_head_dim": V, "qkv_bias": True,
    },
}  # fmt: skip
sizes = pytest.mark.parametrize("name", SIZES)


def heads(name: str, **options: Any) -> NativeSparseAttentionConfig:
    given = {"rope": RopeConfig(), **SIZES[name], **options}
    return NativeSparseAttentionConfig(H, G, D, **given)


def layer(name: str, dtype: torch.dtype = torch.float64) -> NativeSparseAttention:
    torch.manual_seed(0)
    made = NativeSparseAttention.from_config(E, heads(name))
    for compress in (made.compress_k, made.compress_v):
        torch.nn.init.normal_(compress.positions)
    return made.to(dtype).eval()


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(k @ q / math.sqrt(D), dim=0) if len(k) else k.new_zeros(0)


def compressed(net: BlockCompression, block: Tensor) -> Tensor:
    joined = (block + net.positions).flatten()
    return net.down_proj.weight @ F.silu(net.up_proj.weight @ joined)


def formula(mine: NativeSparseAttention, x: Tensor) -> Tensor:
    """Eqs. 5 to 12 of the paper, token after token and head after head; tokens count from 1."""
    config, T = mine.config, x.shape[1]
    l, d, size, n = config.block_size, config.stride, config.selected_size, config.top_k  # noqa: E741
    q, k, v = mine._project(x, 0)
    (kc, vc), (kw, vw) = mine._made("compressed", x, 0), mine._made("window", x, 0)
    gates = torch.sigmoid(x @ mine.gate_proj.weight.T).unflatten(-1, (H, 3))
    rows = []
    for b in range(len(x)):
        for t in range(1, T + 1):
            out: list[Tensor] = []
            for g in range(G):
                group = range(g * H // G, (g + 1) * H // G)
                starts = [i * d for i in range((t - l) // d + 1)]  # eq. 7
                keys = [compressed(mine.compress_k, kc[b, g, s : s + l]) for s in starts]
                values = [compressed(mine.compress_v, vc[b, g, s : s + l]) for s in starts]
                K = torch.stack(keys) if keys else x.new_zeros(0, D)
                total = [x.new_zeros(()) for _ in range(-(-t // size))]
                for h in group:
                    p = softmax(q[b, h, t - 1], K)  # eq. 8
                    for j in range(1, len(total) + 1):  # eq. 9, which counts i and j from 1
                        for m in range(size // d):
                            for o in range(l // d):
                                i = size // d * j - m - o
                                if 1 <= i <= len(p):
                                    total[j - 1] = total[j - 1] + p[i - 1]  # eq. 10
                always = {*range(min(config.first_blocks, len(total)))}
                always |= {*range(max(0, len(total) - config.last_blocks), len(total))}
                order = sorted(range(len(total)), key=lambda j: (j not in always, -total[j]))
                places = [s for j in sorted(order[:n]) for s in range(j * size, (j + 1) * size)]
                places = [s for s in places if s < t]  # eqs. 11, 12
                for h in group:
                    p, query = softmax(q[b, h, t - 1], K), q[b, h, t - 1]
                    near = slice(max(0, t - config.last_keys), t)
                    parts = [
                        p @ torch.stack(values) if values else x.new_zeros(v.shape[-1]),
                        softmax(query, k[b, g, places]) @ v[b, g, places],
                        softmax(query, kw[b, g, near]) @ vw[b, g, near],
                    ]
                    out.append(gates[b, t - 1, h] @ torch.stack(parts))  # eq. 5
            rows.append(mine.o_proj(torch.cat(out)))
    return torch.stack(rows).view(x.shape)


@sizes
def test_it_is_the_papers_formula_with_its_gradients(name):
    mine, x = layer(name), tokens(1, 61 if name == "quarter overlapping" else 31).requires_grad_()
    wanted = formula(mine, x)
    torch.testing.assert_close(mine(x, mask=CAUSAL), wanted)
    weights = [x, *mine.parameters()]
    found = torch.autograd.grad(mine(x).square().sum(), weights)  # causal whatever the mask
    for one, other in zip(found, torch.autograd.grad(wanted.square().sum(), weights), strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().sum() > 0
    with torch.no_grad():
        for kernel in ("auto", "tiled", "reference"):
            torch.testing.assert_close(mine(x, mask=CAUSAL, kernel=kernel), wanted)


def test_few_keys_are_all_read_and_far_ones_chosen():
    mine, x = layer("half overlapping"), tokens(1, 27)
    every = NativeSparseAttention.from_config(E, dataclasses.replace(mine.config, top_k=99))
    every.to(torch.float64).load_state_dict(mine.state_dict())
    torch.testing.assert_close(every(x)[:, :16], mine(x)[:, :16])
    assert not torch.allclose(every(x)[:, 20:], mine(x)[:, 20:])


CACHES: dict[str, tuple[Layout, Quantized | None]] = {
    "dense": (Dense(), None),
    "paged": (Paged(4), None),
    "coded": (Dense(), Quantized(8, 8, group=4, recent=8, sink_tokens=2)),
}


@torch.no_grad()
@sizes
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_equals_one_pass_forked_rolled_back_and_reordered(name, cache):
    layout, quantized = CACHES[cache]
    mine, x = layer(name, torch.float32), tokens(3, 31, dtype=torch.float32)
    held = LayerCache(mine.config.memories, layout, quantized=quantized, spare=7)
    loose = {} if quantized is None else {"atol": 0.05, "rtol": 0.1}
    close = {"atol": 1e-5, "rtol": 1e-4} | loose
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    if quantized is not None:  # codes may change which blocks are chosen
        torch.testing.assert_close(torch.cat(parts[:2], 1), mine(x[:, :10], mask=CAUSAL), **close)
        return
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL), **close)
    check_fork(mine, x, held, **close)


@torch.no_grad()
@sizes
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(name, cached):
    check_padded_rows(layer(name), cached)


@torch.no_grad()
def test_bits_do_not_depend_on_neighbours_in_batch_invariant_mode():
    mine, x = layer("half overlapping", torch.float32), tokens(2, 23, dtype=torch.float32)
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 13], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def model(name: str) -> Transformer:
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    one = LayerConfig(heads(name), network)
    config = TransformerConfig("decoder", 50, E, 256, (one, one))
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    return Transformer(config).eval()


@torch.no_grad()
@sizes
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(name, kind, tmp_path):
    check_decoding(model(name), kind, tmp_path)


def test_a_plan_counts_each_branch():
    config = heads("half overlapping")
    each, made = H * 2 * D, 2 * (4 * D + D) * D
    # Queries at positions 100 to 102 choose 16 keys each, of 101, 102 and 103; 5 are near.
    wanted = each * (3 * 16 + 3 * 5) + each // 2 * 306 + 3 * (G * made // 2)
    assert attention_flops(config, 3, 100, 7) == 2 * 7 * wanted
    # The first tokens have fewer keys than the window.
    assert config.call_cost(1, 4, 0).per_token * 4 == each * (1 + 2 + 3 + 4) + 4 * G * made // 2
    assert config.call_cost(1, 4, 3).per_token * 4 == each * (4 + 5 + 5 + 5) + 4 * G * made // 2


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer("half overlapping", torch.float32), tokens(1, 3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=CAUSAL, cache=ph.DenseCache())
    with pytest.raises(ValueError, match="over its own input: got a context"):
        mine(x, x)
    with pytest.raises(UnsupportedError, match="takes no bias"):
        mine(x, mask=CAUSAL, bias=torch.zeros(1, H, 3, 3))
    with pytest.raises(UnsupportedError, match="cannot hide single tokens"):
        mine(x, mask=CAUSAL & ph.Documents([1, 2]))
    with pytest.raises(UnsupportedError, match="weights of three branches"), ph.probe(mine):
        mine(x, mask=CAUSAL)
    for wrong, words in (
        ({"block_size": 5}, "stride must divide block_size=5"),
        ({"block_size": 8}, "selected_size must be at least block_size=8: got 4"),
        ({"top_k": 2}, r"first_blocks \+ last_blocks=3, which are always chosen: got 2"),
        ({"block_size": 1}, "block_size must be a whole number"),
        ({"window": 4}, "native sparse attention has no window: got 4"),
        ({"sinks": True}, "has no sinks"),
    ):
        with pytest.raises(ConfigError, match=words):
            heads("half overlapping", **wrong)
    whole = model("half overlapping")
    with pytest.raises(UnsupportedError, match="NativeSparseAttention"):
        check_classes(whole, "context")
    with pytest.raises(UnsupportedError, match="layer 0 is NSA GQA-2 4 query"):
        ph.convert(whole, num_kv_heads=1)
