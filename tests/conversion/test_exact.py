"""Exact steps: float64 logits stay within 1e-11, and a step that is broken on purpose is seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from small import small

from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import (
    copy_kv_heads,
    fold_norms,
    permute_heads,
    rotate_keys,
    rotate_values,
    to_latent,
)
from polyhead.conversion.proof import TOLERANCE, Proof
from polyhead.errors import DisagreementError, InputError, UnsupportedError
from polyhead.models import Transformer

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 100.0,
}
MODELS: dict[str, Callable[[], Transformer]] = {
    "llama": partial(small, "llama"),
    "llama, yarn": partial(small, "llama", rope_parameters=YARN),
    "qwen2, biases": partial(small, "qwen2"),
    "gpt2, no rotation": partial(small, "gpt2"),
    "stablelm, part of a head rotated": partial(small, "stablelm", partial_rotary_factor=0.5),
}
LATENT = {
    "deepseek_v3": partial(small, "deepseek_v3"),
    "deepseek_v2, queries straight": partial(small, "deepseek_v2", q_lora_rank=None),
}


def _factors(heads: int, pairs: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    real = torch.randn(heads, pairs, dtype=torch.float64, generator=drawn)
    return torch.complex(real + 2 * real.sign(), torch.randn(heads, pairs).double())


def _matrices(count: int, size: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(2)
    noise = torch.randn(count, size, size, dtype=torch.float64, generator=drawn)
    return torch.eye(size, dtype=torch.float64) + 0.3 * noise / size**0.5


def _each(draft: Draft, change: Callable[[int], object]) -> None:
    for layer in draft.layers:
        change(layer)


@pytest.mark.parametrize("name", MODELS)
def test_every_step_keeps_the_logits_of_heads(name):
    draft = Draft.of(MODELS[name]())
    config = draft.heads(0, "a test")
    G, H, D = config.num_kv_heads, config.num_heads, config.head_dim
    pairs = (D if config.rope is None or config.rope.dim is None else config.rope.dim) // 2
    proof = Proof(draft)
    folded: list[str] = []
    proof.step("fold", lambda d: _each(d, lambda i: folded.extend(fold_norms(d, i))))
    assert folded
    assert bool((draft.state["layers.0.attention_norm.weight"] == 1).all())
    order = [2, 3, 1, 0] if G == 2 else [2, 0, 3, 1]
    proof.step("permute", lambda d: _each(d, lambda i: permute_heads(d, i, order)))
    values = _matrices(G, D)
    proof.step("values", lambda d: _each(d, lambda i: rotate_values(d, i, values)))
    factors = _factors(G, pairs)
    proof.step("keys", lambda d: _each(d, lambda i: rotate_keys(d, i, factors)))
    cache = config.cache_shape.elements
    grouped = draft.copy()
    if G < H:
        proof.step("copy", lambda d: _each(d, lambda i: copy_kv_heads(d, i, H)))
        assert draft.heads(0, "a test").layout == "MHA"
    proof = Proof(grouped)
    last = proof.step("latent", lambda d: _each(d, lambda i: to_latent(d, i)), turns=True)
    assert grouped.latent(0, "a test").cache_shape.elements == cache
    assert all(0 < step.error <= TOLERANCE or step.name == "copy" for step in proof.steps)
    assert (last.control is None) == (config.rope is None)
    # What was proved in float64 is the model in float32 as well, through its cache too.
    model = grouped.build(torch.float32)
    ids = torch.randint(61, (2, 9))
    with torch.no_grad():
        expected, held = MODELS[name]()(ids), model.new_cache()
        found = torch.cat([model(ids[:, i : i + 3], cache=held) for i in (0, 3, 6)], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", LATENT)
def test_every_step_keeps_the_logits_of_latent_attention(name):
    draft = Draft.of(LATENT[name]())
    proof = Proof(draft)
    proof.step("fold", lambda d: _each(d, lambda i: fold_norms(d, i)))
    norms = [name for name in draft.state if name.endswith("_a_norm.weight")]
    assert len(norms) == len(draft.layers) * (1 + (name == "deepseek_v3"))
    assert all(bool((draft.state[name] == 1).all()) for name in norms)
    proof.step("permute", lambda d: _each(d, lambda i: permute_heads(d, i, [3, 1, 0, 2])))
    values, factors = _matrices(4, 10), _factors(1, 4)
    proof.step("values", lambda d: _each(d, lambda i: rotate_values(d, i, values)))
    proof.step("keys", lambda d: _each(d, lambda i: rotate_keys(d, i, factors)))
    assert len(proof.steps) == 4
    with pytest.raises(UnsupportedError, match="copying kv heads needs heads with keys"):
        copy_kv_heads(draft, 0, 4)
    with pytest.raises(UnsupportedError, match="latent attention needs heads"):
        to_latent(draft, 0)


def test_a_wrong_step_is_not_taken_for_exact():
    proof = Proof(Draft.of(small("llama")))

    def swap_pairs(draft: Draft) -> None:
        factors = _factors(2, 4)
        rotate_keys(draft, 0, factors)
        draft.put(0, k_proj=draft.get(0, "k_proj.weight").roll(1, 0))

    with pytest.raises(DisagreementError, match="swap is not exact on this model"):
        proof.step("swap", swap_pairs)
    assert proof.steps == []


def test_heads_that_differ_by_their_number_keep_their_order():
    draft = Draft.of(small("gpt_oss", num_local_experts=4, num_experts_per_tok=2))
    before = draft.get(0, "sinks")
    Proof(draft).step("permute", lambda d: permute_heads(d, 0, [2, 3, 1, 0]))
    assert torch.equal(draft.get(0, "sinks"), before[[2, 3, 1, 0]])
    with pytest.raises(UnsupportedError, match=r"layer \d has (a window|sinks), which latent"):
        to_latent(draft, 0)
    mpt = Draft.of(small("mpt"))
    with pytest.raises(UnsupportedError, match="ALiBi"):
        permute_heads(mpt, 0, [1, 0, 2, 3])
    with pytest.raises(UnsupportedError, match="ALiBi"):
        to_latent(mpt, 0)
    qwen3 = Draft.of(small("qwen3", head_dim=8))
    Proof(qwen3).step("permute", lambda d: permute_heads(d, 0, [2, 3, 1, 0]))
    with pytest.raises(UnsupportedError, match="layer 0 normalises queries and keys"):
        rotate_keys(qwen3, 0, _factors(2, 4))


def test_impossible_steps_are_named():
    draft = Draft.of(small("llama"))
    with pytest.raises(InputError, match=r"a multiple of 2 that divides 4 query heads: got 3"):
        copy_kv_heads(draft, 0, 3)
    with pytest.raises(InputError, match="must stay side by side"):
        permute_heads(draft, 0, [0, 2, 1, 3])
    with pytest.raises(InputError, match="each head from 0 to 3 once"):
        permute_heads(draft, 0, [0, 0, 1, 3])
    with pytest.raises(InputError, match=r"matrices must be \[2, 8, 8\]"):
        rotate_values(draft, 0, _matrices(1, 8))
    with pytest.raises(InputError, match="must be invertible"):
        rotate_values(draft, 0, torch.zeros(2, 8, 8, dtype=torch.float64))
    with pytest.raises(InputError, match="must not be 0"):
        rotate_keys(draft, 0, torch.zeros(2, 4, dtype=torch.complex128))
    with pytest.raises(InputError, match="training mode"):
        Draft.of(small("llama").train())
    dynamic = small("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedError, match="'dynamic' change with the length"):
        to_latent(Draft.of(dynamic), 0)
