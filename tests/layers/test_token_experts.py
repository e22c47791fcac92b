"""Experts that ids choose, and scores √softplus: transformers' blocks, models, plans, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from whole_models import check_decoding

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    TokenMixtureConfig,
    TransformerConfig,
)
from polyhead.config.layout import EMBEDDING, TOKENS
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import TokenExperts
from polyhead.layers.experts import Experts
from polyhead.layers.handed import Handed
from polyhead.models import Transformer

E, F, X, K, WORDS = 24, 16, 6, 2, 50
EXPERT = FeedForwardConfig(F, clamp=0.7)
PLAIN: dict[str, Any] = {
    "shared": EXPERT, "scoring": "sqrtsoftplus", "normalize": True, "scale": 1.5,
}  # fmt: skip
BY_SCORES = MixtureConfig(EXPERT, X, K, choice_bias=True, **PLAIN)
BY_IDS = TokenMixtureConfig(EXPERT, X, K, vocab_size=WORDS, **PLAIN)


def pair(config: MixtureConfig) -> tuple[DeepseekV4SparseMoeBlock, Experts]:
    """transformers' block and ours with the same weights, in float64."""
    kind = "hash_moe" if config.reads_tokens else "moe"
    made = DeepseekV4Config(
        hidden_size=E, num_hidden_layers=1, moe_intermediate_size=F, n_routed_experts=X,
        num_experts_per_tok=K, vocab_size=WORDS, mlp_layer_types=[kind], swiglu_limit=0.7,
    )  # fmt: skip
    made._experts_implementation = "eager"
    theirs = DeepseekV4SparseMoeBlock(made, 0).eval().double()
    torch.manual_seed(0)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.5)
        else:
            tensor.copy_(torch.rand(WORDS, X).argsort(dim=1)[:, :K])
    ours = (TokenExperts if config.reads_tokens else Experts)(E, config).eval().double()
    state = {"router.weight": theirs.gate.weight}
    if config.reads_tokens:
        state["table"] = theirs.gate.tid2eid
    else:
        state["choice_bias"] = theirs.gate.e_score_correction_bias
    for name, tensor in theirs.shared_experts.state_dict().items():
        state[f"shared.{name}"] = tensor
    for i in range(X):
        gate, up = theirs.experts.gate_up_proj[i].chunk(2)
        state[f"experts.{i}.gate_proj.weight"], state[f"experts.{i}.up_proj.weight"] = gate, up
        state[f"experts.{i}.down_proj.weight"] = theirs.experts.down_proj[i]
    ours.load_state_dict(state)
    return theirs, ours


def handed(ids: Tensor) -> Handed:
    return Handed(0, {(EMBEDDING, TOKENS): ids})


@pytest.mark.parametrize("config", [BY_SCORES, BY_IDS], ids=["by scores", "by ids"])
def test_it_is_transformers_block_forward_and_backward(config):
    theirs, ours = pair(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 20, E, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(WORDS, (2, 20), generator=generator)
    wanted = theirs(x, input_ids=ids)
    found = ours(x, handed(ids)) if config.reads_tokens else ours(x)
    torch.testing.assert_close(found, wanted)
    (one,) = torch.autograd.grad(found.square().sum(), x)
    (other,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(one, other)


def model() -> Transformer:
    heads = AttentionConfig(4, 2, 8)
    layers = tuple(LayerConfig(heads, network) for network in (BY_IDS, BY_SCORES, BY_IDS))
    config = TransformerConfig("decoder", WORDS, E, 256, layers)
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    made = Transformer(config).eval()
    for module in made.modules():
        if isinstance(module, TokenExperts):
            module.table.copy_(torch.rand(WORDS, X).argsort(dim=1)[:, :K])
    return made


@torch.no_grad()
def test_a_model_hands_its_ids_down_packed_or_not():
    mine, ids = model(), torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(1))
    whole, cache = mine(ids), mine.new_cache()
    parts = [mine(part, cache=cache) for part in ids.split([7, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.rollback([2, 4])
    packed = torch.cat((ids[0, 10:], ids[1, 8:]))[None]
    found = mine(packed, cache=cache, counts=[2, 4])
    wanted = torch.cat((whole[0, 10:], whole[1, 8:]))[None]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    mine.recompute = True
    with torch.enable_grad():
        torch.testing.assert_close(mine(ids), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_plan_counts_the_table_of_which_a_token_reads_a_row():
    mine = model()
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()
    more = dataclasses.replace(BY_IDS, vocab_size=2 * WORDS)
    few, many = (sum(g.count for g in each.parameter_groups(E)) for each in (BY_IDS, more))
    assert many - few == WORDS * K


@torch.no_grad()
def test_it_decodes_as_in_one_pass_with_every_cache(tmp_path):
    torch.manual_seed(0)
    layer = LayerConfig(AttentionConfig(4, 2, 8), MixtureConfig(EXPERT, X, K, **PLAIN))
    check_decoding(
        Transformer(TransformerConfig("decoder", WORDS, E, 256, (layer,))).eval(), "auto", tmp_path
    )


def test_what_does_not_go_is_refused_by_name():
    mine, x = TokenExperts(E, BY_IDS), torch.randn(1, 3, E)
    with pytest.raises(ValueError, match="reads the tokens of the embedding: call it within"):
        mine(x)
    with pytest.raises(UnsupportedError, match="chosen by the ids of tokens"):
        mine.route(x[0])
    for wrong in ({"choice_bias": True}, {"groups": 2}, {"capacity": 4}):
        with pytest.raises(ConfigError, match="experts that ids choose have no choice_bias"):
            dataclasses.replace(BY_IDS, **wrong)
    with pytest.raises(ConfigError, match="vocab_size must be a whole number"):
        dataclasses.replace(BY_IDS, vocab_size=0)
    heads = AttentionConfig(4, 2, 8)
    for options in ({"parallel": "one norm"}, {"shortcut": BY_IDS}):
        with pytest.raises(ConfigError, match="TokenMixtureConfig reads ids as the feed_forward"):
            LayerConfig(heads, BY_IDS, **options)
    layer, plain = LayerConfig(heads, BY_IDS), LayerConfig(heads, FeedForwardConfig(F))
    with pytest.raises(ConfigError, match="encoder_layers have no networks that read ids"):
        TransformerConfig(
            "encoder-decoder", WORDS, E, 64,
            (dataclasses.replace(plain, cross_attention=heads),), (layer,),
        )  # fmt: skip
