"""The mixture of experts equals blocks of transformers: DeepSeek-V2 and V3, Kolibri 1, Mixtral."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    DenseAndExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
)
from polyhead.errors import ConfigError
from polyhead.layers import TransformerLayer
from polyhead.layers.experts import Experts, MixtureConfig

EXPERT = FeedForwardConfig(16)
BESIDE = DenseAndExpertsConfig(FeedForwardConfig(24), MixtureConfig(EXPERT, 8, 3, normalize=True))
CASES: dict[str, tuple[str, str, dict[str, Any], MixtureConfig]] = {
    "v2 greedy": (
        "deepseek_v2",
        "DeepseekV2Moe",
        {"topk_method": "greedy", "routed_scaling_factor": 1.5},
        MixtureConfig(EXPERT, 8, 3, FeedForwardConfig(32), scale=1.5),
    ),
    "v2 groups": (
        "deepseek_v2",
        "DeepseekV2Moe",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        MixtureConfig(EXPERT, 8, 3, FeedForwardConfig(32), groups=4, groups_per_token=2),
    ),
    "v3": (
        "deepseek_v3",
        "DeepseekV3MoE",
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        MixtureConfig(
            EXPERT, 8, 3, FeedForwardConfig(32), scoring="sigmoid", choice_bias=True,
            normalize=True, scale=2.5, groups=2, groups_per_token=1, group_score="best two",
        ),
    ),
    "axk2": (
        "axk2",
        "AXK2MoE",
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        MixtureConfig(
            EXPERT, 8, 3, FeedForwardConfig(32), scoring="sigmoid", choice_bias=True,
            normalize=True, scale=2.5, groups=2, groups_per_token=1, group_score="best two",
            closed_score=0.0,
        ),
    ),
    "kolibri1": (
        "kolibri1",
        "Kolibri1SparseMoeBlock",
        {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
        MixtureConfig(
            EXPERT, 8, 3, FeedForwardConfig(32), scoring="sigmoid", choice_bias=True,
            choice_bias_of="logits",
        ),
    ),
    "mixtral": (
        "mixtral",
        "MixtralSparseMoeBlock",
        {"num_local_experts": 8, "intermediate_size": 16},
        MixtureConfig(EXPERT, 8, 3, normalize=True),
    ),
}  # fmt: skip

_DEEPSEEK = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2}


def pair(case: str) -> tuple[Any, Experts]:
    """transformers' block and ours with the same weights."""
    name, kind, settings, config = CASES[case]
    models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    prefix = {"mixtral": "Mixtral", "kolibri1": "Kolibri1", "axk2": "AXK2"}.get(name, kind[:10])
    made = getattr(configs, f"{prefix}Config")(
        hidden_size=24,
        num_attention_heads=4, num_experts_per_tok=3,
        **(_DEEPSEEK if name.startswith(("deepseek", "axk")) else {}),
        **settings,
    )  # fmt: skip
    made._experts_implementation = "eager"
    theirs = getattr(models, kind)(made).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = Experts(24, config).eval()
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        if ours.choice_bias is not None:
            theirs.gate.e_score_correction_bias.normal_(std=0.3)
            ours.choice_bias.copy_(theirs.gate.e_score_correction_bias)
        for i, expert in enumerate(ours.experts):
            gate, up = theirs.experts.gate_up_proj[i].chunk(2)
            expert.gate_proj.weight.copy_(gate)
            expert.up_proj.weight.copy_(up)
            expert.down_proj.weight.copy_(theirs.experts.down_proj[i])
        if ours.shared is not None:
            ours.shared.load_state_dict(theirs.shared_experts.state_dict())
    return theirs, ours


def tokens() -> Tensor:
    return torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str) -> None:
    theirs, ours = pair(case)
    with torch.no_grad():
        expected, got = theirs(tokens()), ours(tokens())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_router_experts_and_input(case: str) -> None:
    theirs, ours = pair(case)
    x, y = tokens().requires_grad_(), tokens().requires_grad_()
    ours(x).square().sum().backward()
    theirs(y).square().sum().backward()
    for found, wanted in ((x.grad, y.grad), (ours.router.weight.grad, theirs.gate.weight.grad)):
        # Small gradients are what is left of sums that are thousands of times as large.
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


def test_only_the_chosen_experts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair("mixtral")
    ran = []
    for i, expert in enumerate(ours.experts):
        expert.register_forward_hook(lambda m, args, out, i=i: ran.append((i, len(args[0]))))
    x = tokens()[:1, :1]
    with torch.no_grad():
        _, chosen = ours.route(x[0])
        ours(x)
    assert sorted(ran) == [(i, 1) for i in sorted(chosen[0].tolist())]


@pytest.mark.parametrize("weighs", ["output", "input"])
def test_one_token_gets_the_bits_that_it_gets_among_others(weighs: Any) -> None:
    config = MixtureConfig(EXPERT, 8, 4, FeedForwardConfig(32), normalize=True, weighs=weighs)
    experts = Experts(24, config).to(torch.bfloat16)
    with torch.no_grad():
        for x in torch.randn(20, 1, 24).to(torch.bfloat16):
            experts.calls_all = False
            found = experts(x)
            experts.calls_all = True  # which goes through all experts and looks for their rows
            assert torch.equal(found, experts(x))


def test_round_trip_and_refusals() -> None:
    config = CASES["v3"][3]
    assert MixtureConfig.from_json(config.to_json()) == config
    for changes, words in (
        ({"experts_per_token": 5}, "experts_per_token must be 1 to the 4 experts"),
        ({"groups": 3}, "groups must divide num_experts=8"),
        ({"groups_per_token": 3}, "groups_per_token must be 1 to groups=2"),
        ({"scoring": "tanh"}, "scoring must be"),
        ({"group_score": "worst"}, "group_score must be"),
        ({"choice_bias_of": "weights"}, "choice_bias_of must be"),
        ({"choice_bias_of": "logits", "choice_bias": False}, "needs choice_bias"),
    ):
        with pytest.raises(ConfigError, match=words):
            MixtureConfig(**{**vars(config), **changes})


@pytest.mark.parametrize("around", [{"norm_placement": "post"}, {"parallel": "two norms"}])
def test_experts_beside_a_network_stand_where_layers_read_the_stream(around: Any) -> None:
    with pytest.raises(ConfigError, match="DenseAndExpertsConfig norms what it reads"):
        LayerConfig(AttentionConfig(2, 2, 8), BESIDE, **around)


def test_experts_beside_a_network_share_none() -> None:
    with pytest.raises(ConfigError, match="no shared network and no capacity: got shared=Feed"):
        DenseAndExpertsConfig(EXPERT, MixtureConfig(EXPERT, 8, 3, shared=EXPERT))


def test_plans_count_experts_beside_a_network() -> None:
    config = LayerConfig(AttentionConfig(2, 2, 8), BESIDE, norm_placement="sandwich")
    assert not config.has_norm("feed_forward")
    assert config.has_out_norm("feed_forward")
    layer = TransformerLayer.from_config(16, config)
    counted = sum(group.count for group in config.parameter_groups(16))
    assert counted == sum(parameter.numel() for parameter in layer.parameters())
    assert LayerConfig.from_json(config.to_json()) == config
