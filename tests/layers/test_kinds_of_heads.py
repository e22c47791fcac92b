"""Kinds of heads that no model of transformers has: whole models against plain formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import H2O, EvictingCache, LayerCache
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    HeadLayout,
    LatentAttentionConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.conversion import convert
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.interpret import kept_rows
from polyhead.interpret.activations.lens import run_with_cache
from polyhead.interpret.pruning import prune
from polyhead.layers import (
    CoPEAttentionConfig,
    FactorizedAttentionConfig,
    ForgettingAttentionConfig,
    GroupedTiedAttentionConfig,
    MultiTokenAttentionConfig,
    NormalizerAttentionConfig,
    OffByOneAttentionConfig,
    QKNormConfig,
    RopeConfig,
    ScalableSoftmaxAttentionConfig,
    TalkingHeadsAttentionConfig,
    TensorProductAttentionConfig,
    ValueResidualAttentionConfig,
)
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, D, T, WORDS = 24, 6, 17, 50
NETWORK = FeedForwardConfig(32)
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": D}
ROPE = {"rope": RopeConfig(50.0)}
PLAIN: dict[str, Any] = {"window": 5, "qk_norm": QKNormConfig(), "scale": 0.7}
KINDS: dict[str, tuple[HeadLayout, ...]] = {
    "scalable-softmax": (
        ScalableSoftmaxAttentionConfig(**SIZES, **ROPE),
        ScalableSoftmaxAttentionConfig(**SIZES, window=5, qk_norm=QKNormConfig(), scale=0.7),
    ),
    "off-by-one": (
        OffByOneAttentionConfig(**SIZES, **ROPE),
        OffByOneAttentionConfig(**SIZES, window=5, qk_norm=QKNormConfig(), scale=0.7),
    ),
    "forgetting": (
        ForgettingAttentionConfig(**SIZES, **ROPE),
        ForgettingAttentionConfig(**SIZES, window=5, qk_norm=QKNormConfig(), scale=0.7, sinks=True),
    ),
    "sigmoid": (
        NormalizerAttentionConfig(**SIZES, **ROPE, sigmoid_bias=-1.5),
        NormalizerAttentionConfig(**SIZES, **PLAIN),
    ),
    "softpick": (
        NormalizerAttentionConfig(**SIZES, **ROPE, normalizer="softpick"),
        NormalizerAttentionConfig(**SIZES, **PLAIN, normalizer="softpick"),
    ),
    "stick-breaking": (
        NormalizerAttentionConfig(**SIZES, normalizer="stick_breaking"),
        NormalizerAttentionConfig(**SIZES, **PLAIN, normalizer="stick_breaking", own_key=False),
    ),
    "CoPE": (
        CoPEAttentionConfig(**SIZES, num_positions=4),
        CoPEAttentionConfig(**SIZES, **PLAIN, **ROPE),
    ),
    "talking-heads": (
        TalkingHeadsAttentionConfig(**SIZES, **ROPE),
        TalkingHeadsAttentionConfig(**SIZES, **PLAIN, before=False),
    ),
    "multi-token": (
        MultiTokenAttentionConfig(**SIZES, **ROPE, queries=3, keys=4),
        MultiTokenAttentionConfig(**SIZES, **PLAIN, queries=2, keys=3, mixed_heads=1),
    ),
    "value-residual": (
        ValueResidualAttentionConfig(**SIZES, **ROPE),
        ValueResidualAttentionConfig(**SIZES, window=5, scale=0.7, values_of=0),
        ValueResidualAttentionConfig(4, 2, 4, v_head_dim=D, rope=RopeConfig(), values_of=0),
    ),
    "TPA": (
        TensorProductAttentionConfig(4, D, **ROPE),
        TensorProductAttentionConfig(4, D, 3, 1, 2, bias=True, window=5, scale=0.7),
    ),
    "GTA": (
        GroupedTiedAttentionConfig(4, 2, 8, **ROPE),
        GroupedTiedAttentionConfig(4, 1, D, window=5, scale=0.7, sinks=True, qkv_bias=True),
    ),
    "MFA": (
        FactorizedAttentionConfig(4, 1, 8, q_rank=10, **ROPE),
        FactorizedAttentionConfig(
            4,
            2,
            D,
            q_rank=5,
            q_rank_norm=NormConfig(eps=1e-3),
            qkv_bias=True,
            qk_norm=QKNormConfig(),
            window=5,
            scale=0.7,
        ),
    ),
    "GLA": (
        LatentAttentionConfig(4, 12, 6, 4, 5, latent_heads=2, **ROPE),
        LatentAttentionConfig(4, 12, 3, 6, 5, 7, window=5, scale=0.7, latent_heads=4, norm=None),
    ),
}
ON_CONTEXT = ("scalable-softmax", "off-by-one")
"""Kinds that ranks may divide by tokens."""
NORMALIZED = ("sigmoid", "softpick", "stick-breaking", "CoPE", "talking-heads", "multi-token")
"""Kinds that are no softmax."""
TILED = ("forgetting", *NORMALIZED)
"""Kinds whose scores or weights native code does not know."""
NO_HEADS = ("TPA", "GTA", "MFA")
"""Kinds whose projections of queries or keys are no heads side by side."""
each_kind = pytest.mark.parametrize("kind", KINDS)


def model(kind: str) -> Transformer:
    layers = tuple(LayerConfig(attention, NETWORK) for attention in KINDS[kind])
    torch.manual_seed(0)
    made = Transformer(TransformerConfig("decoder", WORDS, E, 64, layers)).eval().double()
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def ids(batch: int = 2, count: int = T) -> Tensor:
    return torch.randint(WORDS, (batch, count), generator=torch.Generator().manual_seed(count))


def queries_and_keys(layer: Any, x: Tensor) -> list[Tensor]:
    """``[B, H, T, D]`` each."""
    c = layer.config
    if isinstance(c, TensorProductAttentionConfig):
        made = [outer_products(c, proj(x)) for proj in (layer.q_proj, layer.k_proj)]
        return [rotated(layer, each) for each in made]
    if isinstance(c, GroupedTiedAttentionConfig):
        q = layer.q_proj(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=-1)
        states = values_of(layer, x, []).repeat_interleave(4 // c.num_kv_heads, dim=1)
        shared = rotated(layer, layer.k_proj(x)[:, None]).expand(-1, 4, -1, -1)
        halves = (q[0], rotated(layer, q[1])), (states.chunk(2, dim=-1)[0], shared)
        return [torch.cat(each, dim=-1) for each in halves]
    if isinstance(c, LatentAttentionConfig):
        first = x if c.q_lora_rank is None else layer.q_a_norm(layer.q_a_proj(x))
        project = layer.q_proj if c.q_lora_rank is None else layer.q_b_proj
        q = project(first).unflatten(-1, (4, -1)).transpose(1, 2)
        n, p = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        r = layer.kv_a_proj_with_mqa(x)[:, None, :, 12:]
        k = ups_of_latents(layer, x)[..., : c.qk_nope_head_dim]
        pairs = (n, rotated(layer, p)), (k, rotated(layer, r).expand(-1, 4, -1, -1))
        return [torch.cat(each, dim=-1) for each in pairs]
    q, k = layer.q_proj(x), layer.k_proj(x).unflatten(-1, (-1, c.head_dim))
    if isinstance(c, FactorizedAttentionConfig):
        if c.q_rank_norm is not None:
            mean = q.square().mean(-1, keepdim=True)
            q = q / (mean + c.q_rank_norm.eps).sqrt() * layer.q_a_norm.weight
        q = q @ layer.q_b_proj.weight.mT
    q = q.unflatten(-1, (-1, c.head_dim))
    if c.qk_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    k = k.transpose(1, 2).repeat_interleave(4 // c.num_kv_heads, dim=1)
    return [rotated(layer, each) for each in (q.transpose(1, 2), k)]


def ups_of_latents(layer: Any, x: Tensor) -> Tensor:
    """``[B, H, T, N + V]`` of the latent head of each query head."""
    c, latent = layer.config, layer.kv_a_proj_with_mqa(x)[..., :12]
    made = []
    for head, up in enumerate(layer.kv_b_proj.weight.chunk(4)):
        of = head // (4 // c.latent_heads)
        part = latent.chunk(c.latent_heads, dim=-1)[of]
        if c.norm is not None:
            mean = part.square().mean(-1, keepdim=True)
            part = part / (mean + c.norm.eps).sqrt() * layer.kv_a_norm.weight[of]
        made.append(part @ up.mT)
    return torch.stack(made, dim=1)


def rotated(layer: Any, x: Tensor) -> Tensor:
    return x if layer.rope is None else layer.rope.apply(x)


def outer_products(c: TensorProductAttentionConfig, vectors: Tensor) -> Tensor:
    rank = vectors.shape[-1] // (c.num_heads + c.head_dim)
    over_heads, over_features = vectors.split([rank * c.num_heads, rank * c.head_dim], dim=-1)
    parts = (over_heads.unflatten(-1, (rank, -1)), over_features.unflatten(-1, (rank, -1)))
    return torch.einsum("btrh,btrd->bhtd", *parts) / rank


def weights_of(layer: Any, x: Tensor) -> Tensor:
    """``[B, H, T, T]`` by the formulas, from the parameters."""
    c, n = layer.config, x.shape[1]
    q, k = queries_and_keys(layer, x)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if c.scale is None else c.scale)
    at = torch.arange(n, dtype=x.dtype)
    back = at[:, None] - at
    seen = (back >= 0) & (back < (c.window or n))
    if isinstance(c, ScalableSoftmaxAttentionConfig):
        scores = scores * layer.growth[:, None, None] * seen.sum(1, keepdim=True).to(x.dtype).log()
    if not getattr(c, "own_key", True):
        seen = seen & (back >= 1)
    if getattr(c, "normalizer", None) == "sigmoid":
        return torch.sigmoid(scores + c.sigmoid_bias) * seen
    if getattr(c, "normalizer", None) == "softpick":
        terms = torch.expm1(scores) * seen
        least = 1e-8 * (scores.detach() * seen).amax(-1, keepdim=True).exp()
        return terms.clamp(min=0) / (terms.abs().sum(-1, keepdim=True) + least)
    if getattr(c, "normalizer", None) == "stick_breaking":
        share, left = torch.sigmoid(scores) * seen, torch.ones_like(scores[..., 0])
        taken = []
        for j in reversed(range(n)):
            taken.append(share[..., j] * left)
            left = left * (1 - share[..., j])
        return torch.stack(taken[::-1], dim=-1)
    if isinstance(c, CoPEAttentionConfig):
        gates = torch.sigmoid(scores) * seen
        counted = torch.stack([gates[..., j:].sum(-1) for j in range(n)], -1)
        counted = counted.clamp(max=c.num_positions - 1)
        columns = (1 - (counted[..., None] - torch.arange(c.num_positions)).abs()).clamp(min=0)
        scores = scores + torch.einsum("bhijn,nd,bhid->bhij", columns, layer.position_embedding, q)
    if isinstance(c, MultiTokenAttentionConfig):
        near = torch.arange(n)
        rows = torch.stack([near == near[:, None] - a for a in range(c.queries)]).to(x.dtype)
        ahead = [c.keys // 2 - b for b in range(c.keys)]
        columns = torch.stack([near == near[:, None] + a for a in ahead]).to(x.dtype)
        scores = torch.einsum("hac,aip,cjr,bhpr->bhij", layer.kernel, rows, columns, scores * seen)
    if getattr(layer, "before", None) is not None:
        scores = torch.einsum("gf,bfij->bgij", layer.before, scores)
    if isinstance(c, ForgettingAttentionConfig):
        logs = torch.sigmoid(layer.forget_proj(x)).log()  # [B, T, H]
        between = (at > at[:, None, None]) & (at <= at[:, None])  # [j, i, l]: j < l <= i
        scores = scores + torch.einsum("jil,blh->bhij", between.to(x.dtype), logs)
    weights = scores.exp() * seen
    more = float(isinstance(c, OffByOneAttentionConfig))
    if getattr(layer, "sinks", None) is not None:
        more = layer.sinks.exp()[:, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + more)
    if getattr(c, "mixed_heads", 1) > 1:
        mixed = torch.einsum(
            "pgf,bpfij->bpgij", layer.mix, weights.unflatten(1, (-1, c.mixed_heads))
        )
        return mixed.flatten(1, 2)
    if getattr(layer, "after", None) is not None:
        return torch.einsum("gf,bfij->bgij", layer.after, weights)
    return weights


def values_of(layer: Any, x: Tensor, before: list[Tensor]) -> Tensor:
    """``[B, G, T, D]``; those of the layers before are given."""
    if isinstance(layer.config, TensorProductAttentionConfig):
        return outer_products(layer.config, layer.v_proj(x))
    if isinstance(layer.config, LatentAttentionConfig):
        return ups_of_latents(layer, x)[..., layer.config.qk_nope_head_dim :]
    v = layer.v_proj(x).unflatten(-1, (-1, layer.config.value_dim)).transpose(1, 2)
    of = getattr(layer.config, "values_of", None)
    return v if of is None else layer.mix[0] * before[of] + layer.mix[1] * v


def attended(layer: Any, x: Tensor, v: Tensor) -> Tensor:
    heads = weights_of(layer, x) @ v.repeat_interleave(4 // v.shape[1], dim=1)
    return layer.o_proj(heads.transpose(1, 2).flatten(2))


def by_formula(made: Transformer, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the weights of each layer."""
    x, weights, values = made.embedding(tokens), [], []
    for layer in made.layers:
        normed = layer.attention_norm(x)
        weights.append(weights_of(layer.attention, normed))
        values.append(values_of(layer.attention, normed, values))
        x = x + attended(layer.attention, normed, values[-1])
        x = x + layer.feed_forward(layer.feed_forward_norm(x))
    return made.logits(made.final_norm(x)), weights


@each_kind
def test_logits_and_gradients_are_those_of_the_formula(kind: str) -> None:
    made, tokens, found = model(kind), ids(), []
    for call in ("formula", "once", "recomputed"):
        made.zero_grad()
        made.recompute = call == "recomputed"
        logits = by_formula(made, tokens)[0] if call == "formula" else made(tokens)
        logits.sin().sum().backward()
        found.append([logits, *(parameter.grad for parameter in made.parameters())])
    for wanted, *others in zip(*found, strict=True):
        for got in others:
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


@each_kind
@pytest.mark.parametrize("cache_kind", ["auto", "dense", "paged"])
@torch.no_grad()
def test_chunks_through_caches_equal_one_pass(kind: str, cache_kind: Any, tmp_path: Path) -> None:
    made, tokens = model(kind), ids()
    whole = by_formula(made, tokens)[0]
    cache = made.new_cache(kind=cache_kind, spare=4)
    found = [made(part, cache=cache) for part in tokens.split([7, 1, 1, 5, 3], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), whole)
    cache.save(tmp_path / "cache.safetensors")
    other = made.new_cache(kind=cache_kind, spare=4)
    other.load(tmp_path / "cache.safetensors")
    for each in (other, cache.fork()):
        each.rollback(3)
        torch.testing.assert_close(made(tokens[:, -3:], cache=each), whole[:, -3:])
    cache.reorder([1, 1, 0])
    cache.rollback([1, 4, 2])  # rows of different lengths
    rows, first = tokens[[1, 1, 0]], torch.tensor([16, 13, 15])
    for step in range(3):
        new = torch.stack([rows[i, at] for i, at in enumerate((first + step).clamp(max=16))])
        logits = made(new[:, None], cache=cache)
        for i, at in enumerate(first + step):
            if at < T:
                torch.testing.assert_close(logits[i, 0], whole[(1, 1, 0)[i], at])


@torch.no_grad()
@pytest.mark.skipif(native.code() is None, reason="needs native code")
@pytest.mark.parametrize("kind", ["TPA", "GTA", "GLA"])
def test_keys_made_in_each_call_have_the_bits_that_rows_have_alone(kind: str) -> None:
    """In a window too, whose keys lie in a ring."""
    made, tokens, lengths = model(kind).float(), ids(3), [16, 13, 10]
    with ph.batch_invariant():
        cache = made.new_cache(spare=8)
        made(tokens[:, :-1], cache=cache)
        cache.rollback([T - 1 - length for length in lengths])
        for step in range(4):
            at = [min(length + step, T - 1) for length in lengths]
            new = torch.stack([tokens[i, at[i]] for i in range(3)])[:, None]
            found = made(new, cache=cache)
            for i in range(3):
                if lengths[i] + step < T:
                    made(tokens[i : i + 1, : at[i]], cache=(alone := made.new_cache(spare=8)))
                    assert torch.equal(found[i : i + 1], made(new[i : i + 1], cache=alone))


@each_kind
@torch.no_grad()
def test_kernels_agree_with_the_formula(kind: str) -> None:
    made, tokens = model(kind), ids()
    wanted = by_formula(made, tokens)[0]
    made.float()
    for kernel in ("auto", "native", "tiled", "reference"):
        if kernel == "native" and (native.code() is None or kind in TILED):
            continue
        found = made(tokens, kernel=kernel)
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    cache = made.new_cache()  # few tokens, whose projections are one native call
    found = torch.cat([made(part, cache=cache) for part in tokens.split(3, dim=1)], dim=1)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    made(tokens[:, :5].reshape(1, -1), counts=[5, 5], cache=(cache := made.new_cache()))
    packed = torch.cat((tokens[0, 5:9], tokens[1, 5:7]))[None]
    found = made(packed, counts=[4, 2], cache=cache)[0].double()
    rows = torch.cat((wanted[0, 5:9], wanted[1, 5:7]))
    torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-4)


@each_kind
@torch.no_grad()
def test_the_probe_shows_the_weights_of_the_formula(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tokens = model(kind), ids()
    monkeypatch.setattr(kept_rows, "_ROWS", 4)
    with ph.probe(made) as seen:
        logits = made(tokens)
    with ph.probe(made, heads=[1]) as second:
        made(tokens)
    wanted, weights = by_formula(made, tokens)
    torch.testing.assert_close(logits, wanted)
    for i, each in enumerate(weights):
        # Multi-token attention has the queries before the first in front.
        torch.testing.assert_close(seen[i].signed_rows(slice(None))[:, :, -T:], each)
        shares = each if kind not in NORMALIZED else each.abs()
        if kind in NORMALIZED:
            total = shares.sum(-1, keepdim=True)
            shares = torch.where(total > 0, shares / total, 0.0)
        torch.testing.assert_close(seen[i].rows()[:, :, -T:], shares)
        torch.testing.assert_close(seen[i].rows([1], -1), shares[:, 1:2, -1:])
        torch.testing.assert_close(second[i].rows([1])[:, :, -T:], shares[:, 1:2])
        largest = shares.amax(-1)
        torch.testing.assert_close(seen[i].max_weight[..., -T:], largest)
        torch.testing.assert_close(second[i].max_weight[..., -T:], largest[:, 1:2])
    if kind in NORMALIZED:
        with ph.probe(made, requires_grad=True) as seen, torch.enable_grad():
            made(tokens)
        with pytest.raises(InputError, match="needs the graph of the run"):
            seen[0].rows(requires_grad=True)
        assert seen[0].nbytes > 0
        call = second[0].call
        torch.testing.assert_close(call.of_heads([0]).row(5), call.row(5))
    _, cache = run_with_cache(made, tokens)
    assert ("blocks.0.attn.hook_q" in cache) == (kind not in NO_HEADS)


@each_kind
@torch.no_grad()
def test_a_trace_shows_the_weights_of_the_formula(kind: str) -> None:
    made, tokens = model(kind), ids()
    with ph.trace(made) as t:
        saved = [layer.attention.weights.save() for layer in t.layers]
        made(tokens)
    wanted, weights = by_formula(made, tokens)
    for found, each in zip(saved, weights, strict=True):
        # Multi-token attention has the queries before the first in front.
        torch.testing.assert_close(found.value[:, :, -T:], each)
    with ph.trace(made) as t:
        for layer in t.layers:
            layer.attention.weights.edit(lambda weights: weights.clone())
        torch.testing.assert_close(made(tokens), wanted)


@each_kind
@torch.no_grad()
def test_plans_are_what_is_held_and_configurations_are_read_back(kind: str) -> None:
    made = model(kind).float()
    assert TransformerConfig.from_json(made.config.to_json()) == made.config
    planned = ph.plan(made.config, tokens=30, batch_size=2, dtype="float32")
    assert planned.parameters == made.parameter_counts()
    assert kind in planned.cache_layers[0].attention
    cache = made.new_cache(capacity=30)
    made(ids(2, 30), cache=cache)
    assert planned.cache_bytes == cache.bytes


@each_kind
@torch.no_grad()
def test_what_needs_plain_heads_says_so(kind: str) -> None:
    made = model(kind).float()
    cache = made.new_cache(capacity=30)
    made(ids(2, 3), cache=cache)
    said = made.decode_plan(cache).explain()
    assert f"native code does not compute {type(KINDS[kind][0]).__name__}" in said
    with pytest.raises(UnsupportedError, match=type(made.layers[0].attention).__name__):
        prune(made, {0: [1]})
    for dimension in ("tensor",) if kind in ON_CONTEXT else ("tensor", "context"):
        with pytest.raises(UnsupportedError, match=type(made.layers[0].attention).__name__):
            check_classes(made, dimension)
    with pytest.raises(UnsupportedError, match=f"layer 0 is {kind}"):
        convert(made, num_kv_heads=1)


def test_options_that_do_not_go_are_refused_by_name() -> None:
    x = torch.randn(1, 3, E)
    scalable, off_by_one = (KINDS[kind][0] for kind in ("scalable-softmax", "off-by-one"))
    with pytest.raises(ConfigError, match=r"of all or of a window: got chunk=4, window_ahead=None"):
        replace(scalable, chunk=4)
    with pytest.raises(ConfigError, match="got chunk=None, window_ahead=2"):
        replace(scalable, window=3, window_ahead=2)
    with pytest.raises(ConfigError, match="a sink of its own: got sinks=True"):
        replace(off_by_one, sinks=True)
    for kind in ("scalable-softmax", "value-residual", "forgetting"):
        said = "over its own input" if kind == "forgetting" else "self-attention"
        with pytest.raises(ValueError, match=f"{said}: got a context"):
            build_attention(E, KINDS[kind][0])(x, x)
    first, second, _ = KINDS["value-residual"]
    for layers, message in (
        ((second,), "layer 0 reads the values of layer 0, which must come before it"),
        ((second, second), "layer 0 reads the values of layer 0, which must come before it"),
        ((first, replace(second, num_kv_heads=1)), "values_of needs a layer with 1 kv heads"),
        ((AttentionConfig(**SIZES), second), "hand on its values"),
    ):
        with pytest.raises(ConfigError, match=message):
            TransformerConfig("decoder", 9, E, 9, tuple(LayerConfig(a, NETWORK) for a in layers))
    for changed in ({"alibi": ALiBiConfig()}, {"hands_on_keys": True}):
        with pytest.raises(ConfigError, match="forget gates are the only bias"):
            replace(KINDS["forgetting"][0], **changed)
    products = KINDS["TPA"][0]
    for changed, message in (
        ({"k_rank": 0}, "k_rank must be a whole number of at least 1: got 0"),
        ({"rope": RopeConfig(dim=8)}, "rope dim must be at most head_dim=6: got 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(products, **changed)
    tied = KINDS["GTA"][0]
    assert tied.token_elements == 2 * 8 + 4
    for changed, message in (
        ({"head_dim": 6}, "head_dim must be a multiple of 4, since half of a key is shared and"),
        ({"head_dim": 7, "rope": None}, "multiple of 2, since half of a key is shared: got 7"),
        ({"rope": RopeConfig(dim=6)}, "rope dim must be at most half of head_dim=8: got 6"),
        ({"hands_on_keys": True}, "tied keys and values go without .*: got hands_on_keys=True"),
        ({"qk_norm": QKNormConfig()}, "go without v_head_dim, qk_norm, .*: got qk_norm=QKNorm"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(tied, **changed)
    with pytest.raises(ValueError, match="grouped-tied attention is self-attention: got a context"):
        build_attention(E, tied)(x, x)
    factorized = KINDS["MFA"][0]
    with pytest.raises(ConfigError, match="q_rank must be a whole number of at least 1: got 0"):
        replace(factorized, q_rank=0)
    crossed = build_attention(E, replace(factorized, rope=None))
    torch.testing.assert_close(crossed(x, x), crossed(x))
    layer = build_attention(E, products)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 24\]: got \[3, 24\]"):
        layer(x[0])
    with pytest.raises(TypeError, match="no argument 'is_causal'"):
        layer(x, is_causal=True)
    sigmoid, talking, tokens = (KINDS[k][0] for k in ("sigmoid", "talking-heads", "multi-token"))
    for config, changed, message in (
        (sigmoid, {"normalizer": "relu"}, "normalizer must be one of 'sigmoid', 'softpick'"),
        (sigmoid, {"alpha": 3.0}, "alpha must be"),
        (sigmoid, {"sinks": True}, "a softmax's denominator: got sinks=True with sigmoid"),
        (talking, {"before": False, "after": False}, "before, after or both: got neither"),
        (tokens, {"queries": 1}, "queries must be a whole number of at least 2: got 1"),
        (tokens, {"mixed_heads": 3}, "mixed_heads must divide num_heads=4: got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(config, **changed)
    said = "sigmoid GQA-2 does not weigh keys of single tokens by one softmax alone"
    with torch.no_grad(), pytest.raises(UnsupportedError, match=said):
        build_attention(E, sigmoid)(x, mask=ph.Causal(), cache=EvictingCache(H2O(2)))
    sparse = build_attention(E, replace(sigmoid, normalizer="entmax", alpha=2.0))
    assert repr(sparse._normalizer) == "Entmax(alpha=2.0)"
    with pytest.raises(UnsupportedError, match="multi-token attention takes no bias beside"):
        build_attention(E, tokens)(x, bias=torch.zeros(1, 4, 3, 3), positions=torch.arange(-1, 2))
    forgetting = build_attention(E, KINDS["forgetting"][0])
    with pytest.raises(ValueError, match=r"a bias of its own \(forget gates\): got another"):
        forgetting(x, bias=torch.zeros(1, 4, 3, 3))
    with pytest.raises(UnsupportedError, match="forget gates cannot hide single tokens"):
        forgetting(x, mask=ph.Causal() & ph.Prefix(2))
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        forgetting(x, cache=ph.DenseCache())
    with pytest.raises(ValueError, match=r"reads the values of layer 0: call it within its model"):
        build_attention(E, second)(x)
    assert build_attention(E, first)(x).shape == x.shape


@torch.no_grad()
@pytest.mark.parametrize("kind", ["scalable-softmax", "forgetting", "multi-token", "CoPE"])
def test_padding_in_front_is_no_key(kind: str) -> None:
    layer, x = model(kind).layers[0].attention, torch.randn(1, 9, E, dtype=torch.float64)
    padded = torch.cat((torch.randn(1, 2, E, dtype=torch.float64), x), dim=1)
    at, hidden = torch.arange(-2, 9), ~ph.KeyLengths(2)
    hides = kind in ("forgetting", "multi-token")
    mask = ph.Causal() if hides else ph.Causal() & hidden
    found = layer(padded, mask=mask, positions=at)
    torch.testing.assert_close(found[:, 2:], attended(layer, x, values_of(layer, x, [])))
    assert layer(padded, mask=ph.Causal(), positions=at).isfinite().all()


@torch.no_grad()
def test_keys_in_any_order_are_forgotten_by_their_positions() -> None:
    layer, x = model("forgetting").layers[0].attention, torch.randn(1, 9, E).double()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    wanted = attended(layer, x, values_of(layer, x, []))
    found = layer(x[:, order], mask=ph.Causal(), positions=order)
    torch.testing.assert_close(found, wanted[:, order])


@torch.no_grad()
def test_near_keys_are_exact_though_much_was_forgotten() -> None:
    layer = build_attention(E, KINDS["forgetting"][0])
    layer.forget_proj.bias.fill_(-3.0)
    x = torch.randn(1, 3000, E, generator=torch.Generator().manual_seed(1))
    found, cache = layer(x, mask=ph.Causal()), LayerCache(layer.config.memories)
    wanted = layer.double()(x.double(), mask=ph.Causal())
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=0)
    layer.float()(x[:, :-1], cache=cache)
    found = layer(x[:, -1:], cache=cache).double()
    torch.testing.assert_close(found, wanted[:, -1:], atol=2e-6, rtol=0)


@torch.no_grad()
def test_a_head_off_by_one_may_attend_to_nothing_also_in_a_context() -> None:
    layer = build_attention(E, replace(KINDS["off-by-one"][0], scale=-9.0)).double()
    x, context = (torch.randn(1, n, E, dtype=torch.float64) for n in (3, 5))
    torch.nn.init.zeros_(layer.q_proj.weight)
    v = layer.v_proj(context).unflatten(-1, (-1, D)).transpose(1, 2).repeat_interleave(2, dim=1)
    heads = v.sum(dim=2, keepdim=True).expand(1, 4, 3, D) / 6  # five weights of 1 / (1 + 5)
    torch.testing.assert_close(layer(x, context), layer.o_proj(heads.transpose(1, 2).flatten(2)))
