"""Streams read by weights of low rank: transformers' module, decoding, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual
from whole_models import check_decoding

from polyhead.config import (
    AltUpConfig,
    AttentionConfig,
    EngramConfig,
    FeedForwardConfig,
    LayerConfig,
    LowRankConnectionsConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.low_rank_connections import LowRankConnections, LowRankEnds
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, n, R = 16, 3, 5
CONFIG = LowRankConnectionsConfig(n, R, NormConfig(eps=0.01, weight_offset=1.0))
LAYER = LayerConfig(AttentionConfig(4, 2, 8), FeedForwardConfig(24), streams=CONFIG)


def theirs_of(mine: LowRankConnections | LowRankEnds) -> Qwen4ExpTextGatedResidual:
    config = Qwen4ExpTextConfig(hidden_size=E, hc_count=n, hc_lowrank=R, rms_norm_eps=0.01)
    inject = getattr(mine, "inject", None)
    other = Qwen4ExpTextGatedResidual(config, use_combine=inject is not None).double()
    with torch.no_grad():
        for parameter in mine.parameters():
            torch.nn.init.normal_(parameter)
        other.hc_norm.weight.copy_(mine.sum.norm.weight.flatten())
        other.input_mix_weight_down.weight.copy_(mine.sum.down.weight)
        other.input_mix_weight_up.weight.copy_(mine.sum.up.weight)
        if inject is not None:
            other.block_inject_weight.weight.copy_(inject.weight)
    return other


def test_it_is_transformers_module_with_gradients():
    torch.manual_seed(0)
    mine, streams = LowRankConnections(E, CONFIG).double(), torch.randn(2, 5, n, E).double()
    other, made = theirs_of(mine), torch.randn(2, 5, E).double()
    x, kept = mine.read(streams)
    wanted, entered, weights = other(streams.flatten(2))
    after = entered + (made[:, :, None] * weights[..., None]).flatten(2)
    close = {"atol": 1e-5, "rtol": 1e-5}  # their norm works in float32
    torch.testing.assert_close(x, wanted, **close)
    found = mine.write(kept, made)
    torch.testing.assert_close(found.flatten(2), after, **close)
    pairs = [
        (mine.sum.norm.weight, other.hc_norm.weight),
        (mine.sum.down.weight, other.input_mix_weight_down.weight),
        (mine.sum.up.weight, other.input_mix_weight_up.weight),
        (mine.inject.weight, other.block_inject_weight.weight),
    ]
    for ours, theirs in pairs:
        loss, its = (found * found).sum() + (x * x).sum(), (after * after).sum()
        (one,) = torch.autograd.grad(loss, ours, retain_graph=True)
        (two,) = torch.autograd.grad(its + (wanted * wanted).sum(), theirs, retain_graph=True)
        torch.testing.assert_close(one.flatten(), two.flatten(), atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_at_first_streams_are_copies_and_at_last_one_vector_is_read():
    torch.manual_seed(0)
    ends, x = LowRankEnds(E, CONFIG).double(), torch.randn(2, 5, E).double()
    other, streams = theirs_of(ends), torch.randn(2, 5, n, E).double()
    assert torch.equal(ends.enter(x), x[:, :, None].expand(2, 5, n, E))
    wanted = other(streams.flatten(2))
    torch.testing.assert_close(ends.leave(streams), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_model_decodes_as_in_one_pass_without_norms_of_its_parts(tmp_path):
    config = TransformerConfig("decoder", 50, E, 64, (LAYER,) * 2, final_norm=None)
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    model = Transformer(config).eval()
    assert model.layers[0].attention_norm is None
    assert model.layers[0].feed_forward_norm is None
    check_decoding(model, "auto", tmp_path)
    with pytest.raises(UnsupportedError, match="LowRankEnds"):
        check_classes(model, "tensor")


def test_what_does_not_go_is_refused_by_name():
    with pytest.raises(ConfigError, match="rank must be a whole number"):
        LowRankConnectionsConfig(2, 0)
    with pytest.raises(ConfigError, match="norm type must be"):
        LowRankConnectionsConfig(2, norm=NormConfig("affine"))
    engram = EngramConfig(streams=4, width=E, vocab_size=50, end_token_id=0, dim=16)
    for streams in (None, CONFIG, AltUpConfig(4)):
        with pytest.raises(ConfigError, match="EngramConfig reads all of 4 residual streams"):
            LayerConfig(engram, None, streams=streams)
    four = dataclasses.replace(CONFIG, count=4)
    with pytest.raises(ConfigError, match="norm_placement='after'"):
        LayerConfig(engram, None, norm_placement="after", streams=four)
