"""TransformerLens's run_with_cache and run_with_hooks: its names and shapes, our numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from traced_models import made, texts

import polyhead as ph
from polyhead.errors import InputError
from polyhead.interpret.activations.lens import HookPoint, run_with_cache, run_with_hooks

IDS = texts("llama")["ids"]


@torch.no_grad()
def test_the_cache_has_the_activations_with_heads_behind_positions() -> None:
    model = made("llama")
    logits, cache = run_with_cache(model, IDS)
    torch.testing.assert_close(logits, model(IDS), atol=2e-5, rtol=2e-5)
    config = model.config.layers[0].attention
    B, T = IDS.shape
    H, G, D = config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {
        "attn.hook_q": (B, T, H, D),
        "attn.hook_k": (B, T, G, D),
        "attn.hook_v": (B, T, G, D),
        "attn.hook_rot_q": (B, T, H, D),
        "attn.hook_rot_k": (B, T, G, D),
        "attn.hook_z": (B, T, H, D),
        "attn.hook_pattern": (B, H, T, T),
        "attn.hook_attn_scores": (B, H, T, T),
        "hook_resid_mid": (B, T, model.config.embed_dim),
        "mlp.hook_pre": (B, T, 80),
        "mlp.hook_pre_linear": (B, T, 80),
        "mlp.hook_post": (B, T, 80),
    }
    for name, shape in shapes.items():
        assert cache[f"blocks.1.{name}"].shape == shape, name
    torch.testing.assert_close(cache["pattern", -1].sum(-1), torch.ones(B, H, T))
    with ph.trace(model, IDS) as t:
        queries = t.layers[1].attention.q.save()
        stream, hidden = t.layers[1].resid_mid.save(), t.layers[1].mlp.hidden.save()
    torch.testing.assert_close(cache["rot_q", 1], queries.value.transpose(1, 2))
    turned = model.layers[1].attention.rope.apply(cache["q", 1], 0, head_axis=2)
    torch.testing.assert_close(turned, cache["rot_q", 1])
    torch.testing.assert_close(cache["resid_mid", 1], stream.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache["post", 1], hidden.value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache["normalized2", 1], cache["blocks.1.ln2.hook_normalized"])
    assert len(cache) == len(list(cache)) == 2 * 18 + 1
    with pytest.raises(KeyError, match=r"the cache has no 'blocks\.0\.other'"):
        _ = cache["other", 0]


@torch.no_grad()
def test_names_are_chosen_by_name_or_by_what_says_so() -> None:
    model = made("bert")
    _, cache = run_with_cache(model, IDS, names_filter=lambda name: name.endswith("hook_z"))
    assert list(cache) == ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    _, cache = run_with_cache(model, IDS, names_filter="blocks.0.mlp.hook_pre")
    assert list(cache) == ["blocks.0.mlp.hook_pre"]
    with pytest.raises(InputError, match=r"this model has no 'blocks\.7\.hook_resid_pre'"):
        run_with_cache(model, IDS, names_filter=["blocks.7.hook_resid_pre"])
    _, cache = run_with_cache(made("states"), IDS)
    assert "blocks.0.attn.hook_q" not in cache
    assert "blocks.1.attn.hook_q" in cache


@torch.no_grad()
def test_hooks_change_what_they_return_something_for() -> None:
    model, called = made("llama"), []

    def zero_head(z: Tensor, hook: HookPoint) -> Tensor:
        called.append((hook.name, hook.layer()))
        z = z.clone()
        z[:, :, 2] = 0.0
        return z

    def scale(q: Tensor, hook: HookPoint) -> Tensor:
        return q * 2

    def watch(x: Tensor, hook: HookPoint) -> None:
        called.append((hook.name, hook.layer()))

    name = "blocks.1.attn.hook_z"
    hooks = [(name, zero_head), (lambda n: n.endswith("resid_post"), watch)]
    out = run_with_hooks(model, IDS, fwd_hooks=hooks)
    with ph.ablate(model, {1: [2]}):
        torch.testing.assert_close(out, model(IDS), atol=1e-6, rtol=1e-6)
    assert called == [("blocks.0.hook_resid_post", 0), (name, 1), ("blocks.1.hook_resid_post", 1)]
    doubled = run_with_hooks(model, IDS, fwd_hooks=[("blocks.0.attn.hook_q", scale)])
    rotated = run_with_hooks(model, IDS, fwd_hooks=[("blocks.0.attn.hook_rot_q", scale)])
    torch.testing.assert_close(doubled, rotated, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="belongs to no layer"):
        HookPoint("ln_final.hook_normalized").layer()
