"""Routers, shared experts and networks of experts that families choose, against transformers'."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead.config import FeedForwardConfig, MixtureConfig
from polyhead.errors import ConfigError
from polyhead.layers.experts import Experts

E, F, X = 24, 16, 8
SILU, GPT_OSS = (
    FeedForwardConfig(F),
    FeedForwardConfig(F, "quick_gelu", bias=True, clamp=1.5, up_offset=1.0),
)
# Module of transformers, class of the block, settings of its configuration, ours.
CASES: dict[str, tuple[str, str, dict[str, Any], MixtureConfig]] = {
    "gated shared expert": (
        "qwen2_moe", "Qwen2MoeSparseMoeBlock",
        {"num_experts": X, "num_experts_per_tok": 3, "moe_intermediate_size": F,
         "shared_expert_intermediate_size": 20},
        MixtureConfig(SILU, X, 3, FeedForwardConfig(20), shared_gate=True),
    ),
    "clamped experts with biases": (
        "gpt_oss", "GptOssMLP", {"num_local_experts": X, "num_experts_per_tok": 3,
                                 "intermediate_size": F, "swiglu_limit": 1.5},
        MixtureConfig(GPT_OSS, X, 3, router_bias=True, normalize=True),
    ),
    "weights on the input": (
        "llama4", "Llama4TextMoe", {"num_local_experts": X, "num_experts_per_tok": 2,
                                    "intermediate_size": F},
        MixtureConfig(SILU, X, 2, SILU, scoring="sigmoid", weighs="input"),
    ),
    "sparsemixer": (
        "phimoe", "PhimoeSparseMoeBlock", {"num_local_experts": X, "num_experts_per_tok": 2,
                                           "intermediate_size": F, "router_jitter_noise": 0.3},
        MixtureConfig(SILU, X, 2, scoring="sparsemixer", jitter=0.3),
    ),
    "average with a shared expert": (
        "cohere2_moe", "Cohere2MoeSparseMoeBlock",
        {"num_experts": X, "num_experts_per_tok": 3, "intermediate_size": F,
         "num_shared_experts": 2, "expert_selection_fn": "sigmoid"},
        MixtureConfig(SILU, X, 3, FeedForwardConfig(2 * F), scoring="sigmoid", normalize=True,
                      scale=0.5, shared_scale=0.5),
    ),
    "capacity": (
        "switch_transformers", "SwitchTransformersSparseMLP",
        {"num_experts": X, "d_model": E, "d_ff": F, "expert_capacity": 3},
        MixtureConfig(FeedForwardConfig(F, "relu", gated=False), X, 1, capacity=3),
    ),
}  # fmt: skip


def pair(case: str) -> tuple[nn.Module, Experts]:
    """transformers' block and ours with the same weights, in float64."""
    family, kind, settings, config = CASES[case]
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    names = {"qwen2_moe": "Qwen2Moe", "gpt_oss": "GptOss", "llama4": "Llama4Text"}
    names |= {
        "cohere2_moe": "Cohere2Moe",
        "phimoe": "Phimoe",
        "switch_transformers": "SwitchTransformers",
    }
    made = getattr(configs, f"{names[family]}Config")(
        **({} if family == "switch_transformers" else {"hidden_size": E}), **settings
    )
    made._experts_implementation = "eager"
    theirs = getattr(models, kind)(made).eval().double()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = Experts(E, config).eval().double()
    ours.load_state_dict(ours_of(dict(theirs.state_dict()), config))
    return theirs, ours


def ours_of(theirs: dict[str, Tensor], config: MixtureConfig) -> dict[str, Tensor]:
    """Our names and layouts of a block's parameters."""
    state = {}
    for name, tensor in theirs.items():
        name = name.replace("shared_experts.", "shared.")
        if "experts." in name or "experts.expert_" in name:
            continue
        name = name.replace("gate.weight", "router.weight") if name == "gate.weight" else name
        name = name.replace("shared_expert_gate", "shared_gate")
        name = name.replace("shared_expert.", "shared.").replace("router.classifier.", "router.")
        state[name] = tensor
    for i in range(config.num_experts):
        own = f"experts.expert_{i}."
        if f"{own}wi.weight" in theirs:
            state[f"experts.{i}.up_proj.weight"] = theirs[f"{own}wi.weight"]
            state[f"experts.{i}.down_proj.weight"] = theirs[f"{own}wo.weight"]
            continue
        both, down = theirs["experts.gate_up_proj"][i], theirs["experts.down_proj"][i]
        if both.shape[0] == E:  # stored input first
            both, down = both.mT, down.mT
        apart = "experts.gate_up_proj_bias" in theirs
        for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            half = rows if apart else (slice(0, F) if part == "gate" else slice(F, None))
            state[f"experts.{i}.{part}_proj.weight"] = both[half]
            if apart:
                bias = theirs["experts.gate_up_proj_bias"][i]
                state[f"experts.{i}.{part}_proj.bias"] = bias[half]
        state[f"experts.{i}.down_proj.weight"] = down
        if apart:
            state[f"experts.{i}.down_proj.bias"] = theirs["experts.down_proj_bias"][i]
    return state


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_forward_and_backward(case: str) -> None:
    theirs, ours = pair(case)
    x = torch.randn(2, 40, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs(other)
    expected = (expected[0] if isinstance(expected, tuple) else expected).view_as(x)
    got = ours(mine)
    # In theirs, scores or the router are float32.
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    got.square().sum().backward()
    expected.square().sum().backward()
    assert (mine.grad - other.grad).abs().max() < 1e-5 * other.grad.abs().max()


def test_what_does_not_go_together_is_refused() -> None:
    for changes, words in (
        ({"shared_gate": True}, "shared_gate needs a shared network"),
        ({"shared_scale": 0.5}, "shared_scale needs a shared network"),
        ({"jitter": 0.1}, "jitter is at least 0 and belongs to scoring 'sparsemixer'"),
        ({"scoring": "sparsemixer", "normalize": True}, "sparsemixer chooses 1 or 2 experts"),
        ({"capacity": 0}, "capacity must be a whole number of at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            MixtureConfig(SILU, X, 2, **changes)
