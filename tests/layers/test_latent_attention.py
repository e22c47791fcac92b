"""Latent attention: its two computations agree, and the past is never expanded in a decode step."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polyhead as ph
from allocations import measured
from polyhead import native
from polyhead.caches import (
    Dense,
    Latent,
    LatentCache,
    Layout,
    Paged,
    PagedCache,
    QuantizedCache,
    Ring,
)
from polyhead.errors import ConfigError
from polyhead.layers import (
    AttentionRecord,
    LatentAttentionConfig,
    MultiHeadLatentAttention,
    RoPE,
    RopeConfig,
)

YARN = RopeConfig(
    type="yarn",
    factor=40.0,
    original_max_positions=64,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.707,
    mscale_all_dim=0.707,
)
R, P, H, N, V = 24, 8, 4, 16, 12
SIZES: dict[str, Any] = {
    "num_heads": H,
    "kv_lora_rank": R,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": P,
    "v_head_dim": V,
}
BOTH = pytest.mark.parametrize("computation", ["absorbed", "expanded"])


def small(**changes: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    return MultiHeadLatentAttention(48, **{**SIZES, "q_lora_rank": 20, **changes}).eval()


def tokens(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, 48, generator=torch.Generator().manual_seed(1))


# The two computations


def test_temperature_of_yarn_is_in_the_scale() -> None:
    temperature = 0.1 * 0.707 * math.log(40.0) + 1.0
    assert small(rope=YARN).scale == pytest.approx(temperature**2 / math.sqrt(N + P))
    assert small().scale == pytest.approx(1 / math.sqrt(N + P))


@pytest.mark.parametrize(("rope", "steps"), [(YARN, 512), (RopeConfig(), 40), (None, 40)])
def test_absorbed_equals_expanded_over_decode_steps(rope: RopeConfig | None, steps: int) -> None:
    layer = small(rope=rope)
    x = tokens(8 + steps)
    caches = {name: LatentCache(R, P) for name in ("absorbed", "expanded")}
    with torch.no_grad():
        whole = layer(x, mask=ph.Causal(), computation="expanded")
        for name, cache in caches.items():
            layer(x[:, :8], mask=ph.Causal(), cache=cache, computation=name)
        for t in range(8, 8 + steps):
            a, e = (
                layer(x[:, t : t + 1], mask=ph.Causal(), cache=cache, computation=name)
                for name, cache in caches.items()
            )
            torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(a, whole[:, t : t + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_chunks_through_a_cache_equal_one_pass(chunk: int) -> None:
    layer, x, cache = small(), tokens(50), LatentCache(R, P)
    with torch.no_grad():
        parts = [layer(part, mask=ph.Causal(), cache=cache) for part in x.split(chunk, dim=1)]
        whole = layer(x, mask=ph.Causal())
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@BOTH
def test_latents_in_pages_or_in_eight_bits(computation: Any) -> None:
    layer, x, latent = small(), tokens(80), Latent(R, P)
    caches = {
        "pages": PagedCache(7, storage=latent),
        "bits": QuantizedCache(latent=latent, group=8, recent=8),
    }
    with torch.no_grad():
        whole = layer(x, mask=ph.Causal())
        for name, cache in caches.items():
            layer(x[:, :70], mask=ph.Causal(), cache=cache)
            last = layer(x[:, 70:], mask=ph.Causal(), cache=cache, computation=computation)
            exact = {"atol": 1e-5, "rtol": 1e-5} if name == "pages" else {"atol": 2e-3, "rtol": 0}
            torch.testing.assert_close(last, whole[:, 70:], **exact)


@BOTH
def test_rows_of_other_lengths_equal_their_solo_runs(computation: Any) -> None:
    layer, x, cache = small(), tokens(12), LatentCache(R, P)
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :4] = False  # padding on the left
    with torch.no_grad():
        layer(x[:, :10], mask=ph.Causal(), positions=cache.next_positions(real), cache=cache)
        assert cache.lengths == [10, 6]
        got = layer(x[:, 10:], mask=ph.Causal(), cache=cache, computation=computation)
        first = layer(x[:1], mask=ph.Causal())[:, 10:]
        second = layer(x[1:, 4:], mask=ph.Causal())[:, 6:]
    torch.testing.assert_close(got, torch.cat((first, second)), atol=1e-5, rtol=1e-5)


def test_gradients_of_both_computations_agree() -> None:
    grads = []
    for computation in ("absorbed", "expanded"):
        layer, x = small().double(), tokens(9).double().requires_grad_()
        out = layer(x, mask=ph.Causal(), computation=computation)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        (out * weights).sum().backward()
        grads.append({name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad})
    for name, grad in grads[0].items():
        assert grad is not None
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, grads[1][name], atol=1e-12, rtol=1e-9)


@BOTH
def test_gradcheck(computation: Any) -> None:
    layer = MultiHeadLatentAttention(
        6, 2, q_lora_rank=4, kv_lora_rank=3, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3
    ).double()
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    weights = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(
            layer,
            dict(zip(names, weights, strict=True)),
            (x,),
            {"mask": ph.Causal(), "computation": computation},
        )
        return out

    assert torch.autograd.gradcheck(run, (x, *weights))


@BOTH
def test_is_independent_of_batch_neighbours_and_positions_given(computation: Any) -> None:
    layer, x = small(), tokens(12, batch=3)
    with torch.no_grad():
        together = layer(x, mask=ph.Causal(), computation=computation)
        rows = [layer(row[None], mask=ph.Causal(), computation=computation) for row in x]
        shifted = layer(
            x, mask=ph.Causal(), positions=torch.arange(40, 52), computation=computation
        )
    torch.testing.assert_close(together, torch.cat(rows), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(together, shifted, atol=1e-5, rtol=1e-5)


@BOTH
def test_bfloat16_stays_near_float32(computation: Any) -> None:
    layer, x = small(), tokens(12)
    with torch.no_grad():
        exact = layer(x, mask=ph.Causal())
        rounded = layer.bfloat16()(x.bfloat16(), mask=ph.Causal(), computation=computation)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=2e-2, rtol=2e-2)


# Memory


def test_cache_grows_by_latent_and_rotary_part_per_token() -> None:
    layer, cache = small(), LatentCache(R, P)
    with torch.no_grad():
        for length in range(1, 6):
            layer(tokens(1), mask=ph.Causal(), cache=cache)
            assert cache.used_bytes == 2 * length * (R + P) * 4


class Largest(TorchDispatchMode):
    """The greatest number of elements that any operation made, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, Tensor) and not func.is_view:
                self.made = max(self.made, out.numel())
        return result


@pytest.mark.parametrize("batch", [1, 2])
def test_decode_step_makes_no_keys_or_values_of_the_past(batch: int) -> None:
    layer, cache, past = small(), LatentCache(R, P, capacity=1024), 1000
    with torch.no_grad():
        layer(tokens(past, batch), mask=ph.Causal(), cache=cache)
        with Largest() as seen:
            layer(tokens(1, batch), mask=ph.Causal(), cache=cache)
        absorbed = seen.made
        with Largest() as seen:
            layer(tokens(1, batch), mask=ph.Causal(), cache=cache, computation="expanded")
    # The weights of one row per head are the only thing that grows with the past.
    assert absorbed <= batch * (past + 1) * max(H, R + P)
    assert seen.made >= batch * past * H * (N + P)


@torch.no_grad()
def test_decode_step_at_deepseeks_sizes_allocates_little() -> None:
    """By the code that really runs, native where there is some: no dispatch mode watches."""
    past, heads = 2048, 128
    layer = MultiHeadLatentAttention(
        64, heads, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ).eval()
    cache, latent = LatentCache(512, 64, capacity=past + 4), torch.randn(1, 1, past, 576)
    cache.append(latent, latent[..., :512])
    step = partial(layer, torch.randn(1, 1, 64), mask=ph.Causal(), cache=cache)
    for _ in range(2):  # tests the native code, makes a table of rotary positions
        step()
    # Queries and outputs in both orders; by torch a score and a weight per head and key as well.
    assert measured(step)[0] < (1 << 20) + (native.code() is None) * 4 * past * heads * 4
    assert measured(partial(step, computation="expanded"))[0] > past * heads * (192 + 128) * 4


# Choice


@pytest.mark.parametrize("rank", [1, 3, 24, 200])
def test_one_query_is_absorbed_from_a_number_of_keys_on(rank: int) -> None:
    config = dataclasses.replace(small().config, kv_lora_rank=rank)
    fewest = config.absorbed_from
    for keys in (1, 2, 5, 9, 100, 10_000):
        absorbed = config.choose(1, 1, keys) == "absorbed"
        assert absorbed == (fewest is not None and keys >= fewest)


def test_choice_follows_the_cost() -> None:
    layer = MultiHeadLatentAttention(
        64, 128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert layer.explain(1, 4096).computation == "absorbed"
    assert layer.explain(4096, 4096).computation == "expanded"
    # In multiply-adds per head: T·S·1088 + T·512·256 against S·512·256 + T·S·320.
    assert layer.explain(160, 100_000).computation == "absorbed"
    assert layer.explain(180, 100_000).computation == "expanded"
    told = layer.explain(1, 4096)
    assert told.costs["absorbed"].flops == 2 * 128 * (512 * 256 + 4096 * 1088)
    assert told.costs["expanded"].flops == 2 * 128 * (4096 * 512 * 256 + 4096 * 320)
    assert told.costs["absorbed"].elements == 4096 * 576
    assert told.costs["expanded"].elements == 4096 * 128 * 320
    assert "absorbed" in str(told)
    assert "fewer operations" in str(told)
    assert "as asked" in str(layer.explain(1, 4096, computation="expanded"))


def test_forward_does_what_explain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = small(), LatentCache(R, P)
    ran: list[bool] = []
    expand = MultiHeadLatentAttention._expanded

    def watched(self: MultiHeadLatentAttention, source: Any) -> Any:
        ran.append(True)
        return expand(self, source)

    monkeypatch.setattr(MultiHeadLatentAttention, "_expanded", watched)
    with torch.no_grad():
        layer(tokens(30), cache=cache)
        assert bool(ran) == (layer.explain(30, 30, batch_size=2).computation == "expanded")
        assert ran
        ran.clear()
        layer(tokens(1), cache=cache)
        assert bool(ran) == (layer.explain(1, 31, batch_size=2).computation == "expanded")
        assert not ran
        layer(tokens(1), cache=cache, computation="expanded")
        assert ran


# Rows of different lengths


@BOTH
@pytest.mark.parametrize("mask", [None, ph.Causal(), ph.Prefix(5)], ids=repr)
@pytest.mark.parametrize("layout", [Dense(), Ring(40), Paged(4)], ids=repr)
@torch.no_grad()
def test_rows_of_different_lengths_equal_each_row_alone(
    layout: Layout, mask: ph.Mask | None, computation: Any
) -> None:
    layer, x, lengths = small(), tokens(9), (7, 3)
    cache = LatentCache(R, P, layout=layout)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    # What memory held before must not matter.
    cache.append(*(torch.full((2, 1, 7, n), torch.inf) for n in (R + P, R)))
    cache.reset()
    call: Any = {"mask": mask, "computation": computation}
    prompt = layer(x[:, :7], cache=cache, positions=cache.next_positions(real), **call)
    further = layer(x[:, 7:], cache=cache, **call)
    for row, length in enumerate(lengths):
        alone = LatentCache(R, P, layout=layout)
        part = x[row : row + 1]
        wanted = layer(part[:, :length], cache=alone, **call)
        torch.testing.assert_close(prompt[row : row + 1, :length], wanted)
        torch.testing.assert_close(further[row : row + 1], layer(part[:, 7:], cache=alone, **call))


@pytest.mark.skipif(native.code() is None, reason="no native code here")
@BOTH
@torch.no_grad()
def test_a_ring_of_ragged_rows_has_the_bits_of_each_row_alone(computation: Any) -> None:
    layer, x = small(), tokens(12)
    call: Any = {"mask": ph.Causal() & ph.Window(5), "computation": computation}
    ring = {"layout": Ring(5, spare=2)}
    with ph.batch_invariant():
        cache = LatentCache(R, P, **ring)
        real = torch.arange(9) < torch.tensor([9, 4])[:, None]
        layer(x[:, :9], cache=cache, positions=cache.next_positions(real), **call)
        together = [layer(x[:, t : t + 1], cache=cache, **call) for t in (9, 10, 11)]
        for row, length in enumerate((9, 4)):
            alone, part = LatentCache(R, P, **ring), x[row : row + 1]
            layer(part[:, :length], cache=alone, **call)
            for t, found in zip((9, 10, 11), together, strict=True):
                wanted = layer(part[:, t : t + 1], cache=alone, **call)
                assert torch.equal(found[row : row + 1], wanted)


# Hooks


@BOTH
def test_hook_sees_the_call_that_ran(computation: Any) -> None:
    layer, x = small(), tokens(10)
    seen: list[AttentionRecord] = []
    with torch.no_grad():
        without = layer(x, mask=ph.Causal(), computation=computation)
        with layer.register_attention_hook(seen.append):
            watched = layer(x, mask=ph.Causal(), computation=computation)
        layer(x, mask=ph.Causal(), computation=computation)
    assert torch.equal(without, watched)
    assert len(seen) == 1
    record = seen[0]
    assert record.layer is layer
    heads, width, value = (1, R + P, R) if computation == "absorbed" else (H, N + P, V)
    assert record.q.shape == (2, H, 10, width)
    assert record.k.shape == (2, heads, 10, width)
    assert record.v.shape == (2, heads, 10, value)
    again = ph.attention(
        record.q, record.k, record.v, mask=record.mask, scale=record.scale, kernel="reference"
    )
    torch.testing.assert_close(record.out, again, atol=1e-5, rtol=1e-5)


def test_weights_are_the_same_whichever_computation_a_hook_saw() -> None:
    layer, x = small(), tokens(10)
    weights = []
    for computation in ("absorbed", "expanded"):
        seen: list[AttentionRecord] = []
        with torch.enable_grad(), layer.register_attention_hook(seen.append):
            layer(x, mask=ph.Causal(), computation=computation)
        record = seen[0]
        assert record.out.requires_grad
        assert not record.lse.requires_grad
        scores = record.q @ record.k.mT * record.scale
        weights.append(torch.exp(scores - record.lse[..., None]).tril())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, H, 10))


# Data and refusals


def test_config_round_trips() -> None:
    config = LatentAttentionConfig(**SIZES, q_lora_rank=20, rope=YARN, bias=True, dropout=0.1)
    assert LatentAttentionConfig.from_json(config.to_json()) == config
    layer = MultiHeadLatentAttention.from_config(48, config)
    assert layer.config is config
    assert config.latent_dim == R + P
    assert "24+8" in repr(layer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": -1}, "q_lora_rank"),
        ({"num_heads": 2.5}, "num_heads"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"v_head_dim": True}, "v_head_dim"),
        ({"rope": RopeConfig(dim=4)}, "rope dim"),
        ({"dropout": 1.0}, "dropout"),
        ({"embed_dim": 0}, "embed_dim"),
    ],
)
def test_impossible_sizes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MultiHeadLatentAttention(**{"embed_dim": 48, **SIZES, **changes})


def test_wrong_calls_are_named() -> None:
    layer = small()
    with pytest.raises(ValueError, match=r"x must be \[B, T, 48\]: got \[2, 3, 47\]"):
        layer(torch.zeros(2, 3, 47))
    with pytest.raises(ValueError, match=r"computation must be 'auto'.*got 'fast'"):
        layer(tokens(3), computation="fast")
    with pytest.raises(ValueError, match="keys are at least the queries"):
        layer.explain(5, 4)
    with pytest.raises(ValueError, match="both at least 1: got batch_size=0"):
        layer.explain(1, 4, batch_size=0)
    with pytest.raises(ConfigError, match=r"rope must be built from config\.rope"):
        MultiHeadLatentAttention.from_config(
            48, LatentAttentionConfig(**SIZES), rope=RoPE(theta=5.0)
        )


def test_dropout_only_when_training() -> None:
    layer, x = small(dropout=0.5), tokens(10)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))
        layer.train()
        assert not torch.equal(layer(x), layer(x))


def test_explicit_frequencies_and_bare_latents_equal_the_formula() -> None:
    """No norm, no features without rotation, a bias of queries: everything that converted models
    have, against einsum over all pairs of tokens."""
    frequencies = (1.0, 0.3, 0.01)
    config = LatentAttentionConfig(
        num_heads=3,
        kv_lora_rank=8,
        qk_nope_head_dim=0,
        qk_rope_head_dim=6,
        v_head_dim=4,
        bias=True,
        q_bias=True,
        norm=None,
        rope=RopeConfig(type="explicit", frequencies=frequencies),
        scale=0.5,
    )
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention.from_config(16, config).double()
    assert "kv_a_norm.weight" not in layer.state_dict()
    assert sum(p.count for p in config.parameter_groups(16)) == sum(
        p.numel() for p in layer.parameters()
    )
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    latent, q = layer.kv_a_proj_with_mqa(x)[0], layer.q_proj(x)[0].view(9, 3, 6)
    turns = torch.exp(1j * torch.arange(9)[:, None] * torch.tensor(frequencies))
    keys = torch.complex(latent[:, 8:11], latent[:, 11:]) * turns
    queries = torch.complex(q[..., :3], q[..., 3:]) * turns[:, None]
    scores = torch.einsum("thi,si->hts", queries.conj(), keys).real * 0.5
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    values = torch.einsum("hvr,sr->hsv", layer.kv_b_proj.weight.view(3, 4, 8), latent[:, :8])
    expected = layer.o_proj((weights @ values).transpose(0, 1).reshape(9, 12))
    for computation in ("absorbed", "expanded"):
        found = layer(x, mask=ph.Causal(), computation=computation)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="q_bias needs queries straight from the input"):
        dataclasses.replace(config, q_lora_rank=4)
