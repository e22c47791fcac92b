"""A residual stream that vectors scale: transformers' module, dtypes, decoding, plans, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers.models.zaya.modeling_zaya import ZayaResidualScaling

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    ScaledResidualConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.interpret.stream import Stream
from polyhead.layers import ScaledResidual
from polyhead.layers.scaled_residual import ScaledResidualEnds
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E = 16
LAYER = LayerConfig(AttentionConfig(4, 2, 8), FeedForwardConfig(24), streams=ScaledResidualConfig())


def model() -> Transformer:
    torch.manual_seed(0)
    made = Transformer(TransformerConfig("decoder", 50, E, 64, (LAYER,) * 2)).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def test_it_is_transformers_module_with_gradients():
    torch.manual_seed(0)
    mine, theirs = ScaledResidual(E, ScaledResidualConfig()), ZayaResidualScaling(E)
    names = {
        "scale": "residual_scale",
        "shift": "residual_bias",
        "made_scale": "hidden_states_scale",
        "made_shift": "hidden_states_bias",
    }
    stream, made = torch.randn(2, 2, 5, E)
    torch.testing.assert_close(mine.write(stream, made), stream + made)  # at first
    for name, parameter in mine.named_parameters():
        nn.init.normal_(parameter)
        getattr(theirs, names[name]).data.copy_(parameter.data)
    x, kept = mine.read(stream)
    assert torch.equal(x, stream)
    found, wanted = mine.write(kept, made), theirs(made, stream)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter.grad, getattr(theirs, names[name]).grad)


@torch.no_grad()
def test_the_stream_is_float32_whatever_the_weights_are():
    ends, mixer = ScaledResidualEnds(E, LAYER.streams), ScaledResidual(E, LAYER.streams)
    x = torch.randn(2, 5, E)
    torch.testing.assert_close(ends.leave(ends.enter(x)), x)  # at first
    nn.init.normal_(ends.scale)
    nn.init.normal_(ends.shift)
    torch.testing.assert_close(ends.enter(x), (x + ends.shift) * ends.scale)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        stream = ends.to(dtype).enter(x.to(dtype))
        read, kept = mixer.to(dtype).read(stream)
        assert (stream.dtype, read.dtype) == (wide, dtype)
        assert mixer.write(kept, read).dtype == wide
        assert ends.leave(stream).dtype == dtype
    half, seen = model().bfloat16(), []
    for layer in half.layers:
        layer.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    assert half(torch.arange(9)[None]).dtype == torch.bfloat16
    assert seen == [torch.float32] * 2


@torch.no_grad()
def test_decoding_is_one_pass_and_a_plan_counts_what_is_held():
    mine, ids = model(), torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    assert TransformerConfig.from_json(mine.config.to_json()) == mine.config
    whole, cache = mine(ids), mine.new_cache()
    steps = [mine(part, cache=cache) for part in ids.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.rollback([2, 4])
    packed = torch.cat((ids[0, 10:], ids[1, 8:]))[None]
    found = mine(packed, cache=cache, counts=[2, 4])
    wanted = torch.cat((whole[0, 10:], whole[1, 8:]))[None]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert "streams=ScaledResidualConfig" in mine.decode_plan(mine.new_cache()).explain()
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()
    stream = Stream(mine)
    with stream.watching():
        mine(ids[:1])
    torch.testing.assert_close(stream.guesses(11)[-1], whole[0, 11], atol=1e-5, rtol=1e-5)


def test_what_does_not_go_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="ScaledResidual"):
        check_classes(model(), "tensor")
    with pytest.raises(ConfigError, match="a scaled residual is one stream: got count=2"):
        ScaledResidualConfig(2)
    with pytest.raises(ConfigError, match="ScaledResidualConfig is around each part"):
        dataclasses.replace(LAYER, norm_placement="post")
