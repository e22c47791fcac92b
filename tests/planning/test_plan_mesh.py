"""What a plan says of a mesh: shares, refusals, and when transfers hide."""

from __future__ import annotations

from typing import Any

import pytest

import polyhead as ph
from polyhead.errors import ConfigError


def test_ranks_of_a_mesh_hold_their_share() -> None:
    whole = ph.plan("llama-3-8b", tokens=8192)
    plan = ph.plan("llama-3-8b", tokens=8192, mesh={"context": 4, "shard": 2})
    assert plan.mesh is not None
    assert (plan.mesh.ranks, plan.mesh.tokens) == (8, 2048)
    assert plan.mesh.cache_bytes * 4 == whole.cache_bytes
    assert plan.mesh.weight_bytes == -(-whole.weight_bytes // 8)
    by_name = {each.what: each for each in plan.mesh.sent}
    # 32 layers of 8 kv heads: keys and values of 2,048 tokens in bfloat16, three times.
    assert by_name["ring"].forward == 3 * 32 * 2048 * 8 * 256 * 2
    assert by_name["ring"].backward == 3 * 32 * 2048 * 8 * 256 * 2 + 4 * 32 * 2048 * 8 * 256 * 4
    assert by_name["gather"].backward == 3 * 32 * 2048 * 8 * 256 * (2 + 4)
    assert plan.mesh.step_seconds is None
    assert "sent in a step of training: ring" in str(plan)
    assert plan.to_dict()["mesh"]["tokens"] == 2048


def test_transfers_hide_from_as_many_tokens_as_make_both_times_equal() -> None:
    said = {"link": "50GB/s", "flops": "500TFLOP/s"}
    plan = ph.plan("llama-3-8b", tokens=8192, mesh={"context": 4}, **said)
    assert plan.mesh is not None
    tokens = plan.mesh.hides_from
    assert tokens is not None
    config = plan.config
    for count, hidden in ((tokens, True), (tokens // 2, False)):
        again = ph.plan(
            config if count * 4 <= config.max_positions else _longer(config, count * 4),
            tokens=count * 4, mesh={"context": 4}, **said,
        )  # fmt: skip
        assert again.mesh is not None
        assert again.mesh.step_seconds is not None
        work, transfer = again.mesh.step_seconds
        assert (work >= transfer * 0.999) == hidden


def test_ranks_of_expert_hold_their_experts_and_trade_tokens() -> None:
    whole, plan = (
        ph.plan("mixtral-8x7b", tokens=1024, mesh=mesh) for mesh in ({"data": 2}, {"expert": 4})
    )
    assert whole.mesh is not None
    assert plan.mesh is not None
    # 32 layers of 8 experts: three matrices of 4096 × 14336, in bfloat16, of which a quarter stays.
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert whole.mesh.weight_bytes - plan.mesh.weight_bytes == experts * 3 // 4
    sent, average = plan.mesh.sent
    whole_weights = whole.mesh.weight_bytes - experts
    assert (average.what, average.forward) == ("average", 0)
    assert average.backward == 2 * 3 * whole_weights // 4
    assert sent.what == "expert"
    # Two experts of every token, three quarters of them elsewhere, there and back.
    assert sent.forward == sent.backward == 2 * 32 * 2 * 1024 * 4096 * 2 * 3 // 4


def test_ranks_of_shard_fetch_what_the_others_hold() -> None:
    plan = ph.plan("llama-3-8b", tokens=1024, mesh={"shard": 4})
    assert plan.mesh is not None
    (sent,) = plan.mesh.sent
    parts = plan.parameters
    around = parts.embedding + parts.head + 4096  # and the last norm: fetched once, and kept
    assert (sent.what, sent.forward) == ("shard", 2 * parts.total * 3 // 4)
    # Gradients to their owners, and weights of layers once more.
    assert sent.backward == 2 * sent.forward - 2 * around * 3 // 4


@pytest.mark.parametrize("tensor", [1, 4, 8, 16, 32])
def test_tokens_become_heads_of_which_a_rank_has_one_at_least(tensor: int) -> None:
    made = [
        ph.plan("llama-3-8b", tokens=1024, mesh={"context": context, "tensor": tensor}).mesh
        for context in (2, 4)
    ]
    for N, mesh in zip((2, 4), made, strict=True):
        assert mesh is not None
        sent = {each.what: each for each in mesh.sent}
        T, H, G = 1024 // N, 32 // tensor, max(1, 8 // tensor)
        assert ("heads" in sent) == (H % N == 0)
        assert sent["ring"].forward == (N - 1) * 32 * T * G * 256 * 2
        if "heads" in sent:
            numbers = H * 256 // N + max(1, G // N) * 256
            assert sent["heads"].forward == (N - 1) * 32 * T * numbers * 2
        if tensor > 1:
            stream = 65 * T * 4096 * 2
            assert sent["tensor"].forward == stream * 2 * (tensor - 1) // tensor


def _longer(config: ph.TransformerConfig, tokens: int) -> ph.TransformerConfig:
    from dataclasses import replace

    return replace(config, max_positions=tokens)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tp": 2}, r"map dimensions \(data, shard, context, tensor, expert\) to sizes: got tp"),
        ({"expert": 2}, r"must divide the number of experts \(none\): got 2"),
        ({"tensor": 0}, "mesh tensor must be a whole number of at least 1: got 0"),
        ({"tensor": 3}, "must divide num_heads=32: got 3"),
        ({}, "got none"),
        (["tensor"], "got list"),
    ],
)
def test_meshes_that_cannot_be_are_refused(mesh: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ph.plan("llama-3-8b", tokens=1024, mesh=mesh)
    with pytest.raises(ConfigError, match="tensor_parallel and mesh are mutually exclusive"):
        ph.plan("llama-3-8b", tokens=1024, mesh={"tensor": 2}, tensor_parallel=2)
