"""Exact steps: float64 logits stay within 1e-11, and a step that is broken on purpose is seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from small import small

from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import copy_kv_heads, rotate_keys, to_latent
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


def _factors(heads: int, pairs: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    real = torch.randn(heads, pairs, dtype=torch.float64, generator=drawn)
    return torch.complex(real + 2 * real.sign(), torch.randn(heads, pairs).double())


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
    factors = _factors(G, pairs)
    proof.step("keys", lambda d: _each(d, lambda i: rotate_keys(d, i, factors)))
    cache = config.kv.elements
    grouped = draft.copy()
    if G < H:
        proof.step("copy", lambda d: _each(d, lambda i: copy_kv_heads(d, i, H)))
        assert draft.heads(0, "a test").layout == "MHA"
    proof = Proof(grouped)
    last = proof.step("latent", lambda d: _each(d, lambda i: to_latent(d, i)), turns=True)
    assert grouped.latent(0, "a test").kv.elements == cache
    assert all(0 < step.error <= TOLERANCE or step.name == "copy" for step in proof.steps)
    assert (last.control is None) == (config.rope is None)
    # What was proved in float64 is the model in float32 as well, through its cache too.
    model = grouped.build(torch.float32)
    ids = torch.randint(61, (2, 9))
    with torch.no_grad():
        expected, held = MODELS[name]()(ids), model.new_cache()
        found = torch.cat([model(ids[:, i : i + 3], cache=held) for i in (0, 3, 6)], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_latent_attention_is_not_converted_again():
    draft = Draft.of(small("deepseek_v3"))
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


def test_features_that_latent_attention_lacks_are_named():
    gpt_oss = Draft.of(small("gpt_oss", num_local_experts=4, num_experts_per_tok=2))
    with pytest.raises(UnsupportedError, match=r"layer \d has (a window|sinks), which latent"):
        to_latent(gpt_oss, 0)
    with pytest.raises(UnsupportedError, match="ALiBi"):
        to_latent(Draft.of(small("mpt")), 0)
    with pytest.raises(UnsupportedError, match="layer 0 normalizes queries and keys"):
        rotate_keys(Draft.of(small("qwen3", head_dim=8)), 0, _factors(2, 4))


def test_impossible_steps_are_named():
    draft = Draft.of(small("llama"))
    with pytest.raises(InputError, match=r"a multiple of 2 that divides 4 query heads: got 3"):
        copy_kv_heads(draft, 0, 3)
    with pytest.raises(InputError, match="must not be 0"):
        rotate_keys(draft, 0, torch.zeros(2, 4, dtype=torch.complex128))
    with pytest.raises(InputError, match="training mode"):
        Draft.of(small("llama").train())
    dynamic = small("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedError, match="'dynamic' change with the length"):
        to_latent(Draft.of(dynamic), 0)
