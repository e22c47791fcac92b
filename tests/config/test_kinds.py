"""Parts of which there are several kinds: the JSON names the kind, and older JSON is still read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    Data,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadLayout,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    Network,
    NormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.models import Transformer

PARTS: list[tuple[type[Data], Data, str]] = [
    (HeadLayout, AttentionConfig(8, 2, 16, rope=RopeConfig(theta=5.0), window=3), "heads"),
    (HeadLayout, LatentAttentionConfig(4, 16, 8, 4, 8, rope=None), "latent"),
    (Network, FeedForwardConfig(64, bias=True), "plain"),
    (Network, MixtureConfig(FeedForwardConfig(8), 4, 2, shared=FeedForwardConfig(9)), "mixture"),
]


def without_kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_kinds(each) for name, each in value.items() if name != "kind"}
    return value


@pytest.mark.parametrize(("part", "config", "kind"), PARTS, ids=[kind for *_, kind in PARTS])
def test_a_part_is_read_back_as_the_kind_that_its_json_names(
    part: type[Data], config: Data, kind: str
) -> None:
    written = config.to_dict()
    assert written["kind"] == kind
    assert part.from_dict(written) == config
    assert type(config).from_dict(written) == config
    assert part.from_dict(without_kinds(written)) == config


def test_json_from_before_kinds_is_read() -> None:
    layer = LayerConfig(LatentAttentionConfig(4, 16, 8, 4, 8), FeedForwardConfig(64))
    assert LayerConfig.from_dict(without_kinds(layer.to_dict())) == layer


def test_an_unknown_kind_and_a_wrong_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kind must be one of heads, latent.*: got 'linear'"):
        HeadLayout.from_dict({"kind": "linear", "num_heads": 4})
    with pytest.raises(ConfigError, match="AttentionConfig: kind must be 'heads': got 'latent'"):
        AttentionConfig.from_dict({"kind": "latent", "num_heads": 4})


HEADS = AttentionConfig(4, 2, 8)
LAYER = LayerConfig(HEADS, FeedForwardConfig(16))
TWO_HEADS = LayerConfig(AttentionConfig(2, 2, 8), FeedForwardConfig(16))
YARN = RopeConfig(type="yarn", factor=4.0, original_max_positions=32)
EXPLICIT = RopeConfig(type="explicit", dim=4, frequencies=(1.0, 0.1))
MODEL = TransformerConfig("decoder", 20, 32, 16, (LAYER,))


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (HEADS, {"v_head_dim": 0}, "v_head_dim must be a whole number of at least 1: got 0"),
        (HEADS, {"v_head_dim": -1}, "v_head_dim must be a whole number of at least 1: got -1"),
        (HEADS, {"scale": 1e308}, r"scale must be a finite number of at most 1e\+18 or None: got"),
        (LAYER, {"residual_scale": 10**30}, r"residual_scale must be .* at most 1e\+18"),
        (MODEL, {"logit_softcap": 0.0}, "logit_softcap must be a finite number, above 0: got 0"),
        (EmbeddingConfig(), {"dropout": -1.0}, "dropout must be a finite number, at least 0"),
        (NormConfig(), {"eps": -1e-6}, "eps must be a finite number, at least 0: got -1e-06"),
        (RopeConfig(), {"theta": "wide"}, "theta must be a finite number"),
        (YARN, {"factor": -2.0}, r"rope factor must be positive: got -2\.0"),
        (YARN, {"beta_fast": -1.0}, r"rope beta_fast must be at least 0: got -1\.0"),
        (YARN, {"beta_slow": -0.5}, r"rope beta_slow must be at least 0: got -0\.5"),
        (YARN, {"theta": 1.0}, "'yarn' needs another theta than 1"),
        (EXPLICIT, {"dim": 6}, "rope frequencies needs one number per rotated pair, 3: got 2"),
        (
            MODEL,
            {"layers": (LAYER, TWO_HEADS), "relative_bias": RelativeBiasConfig(8, 16)},
            r"relative_bias needs layers of one number of heads: got \[2, 4\]",
        ),
    ],
)
def test_numbers_that_no_model_has_are_refused(
    config: Data, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(config, **change)


def test_the_vanilla_transformer_has_the_parameters_of_torch_s() -> None:
    config = TransformerConfig.vanilla(20, 32, num_layers=2, num_heads=4, hidden_dim=64)
    # Torch adds a norm behind each stack, which the paper does not have.
    theirs = nn.Transformer(32, 4, 2, 2, 64, norm_first=False)
    theirs.encoder.norm = theirs.decoder.norm = None
    counts = Transformer(config).parameter_counts()
    found = counts.attention + counts.feed_forward + counts.norms
    assert found == sum(each.numel() for each in theirs.parameters())


def test_the_base_model_of_2017_has_65_million_parameters() -> None:
    """Vaswani et al., table 3, with the 37,000 shared tokens of section 5.1."""
    config = TransformerConfig.vanilla(37_000)
    assert ph.plan(config, tokens=1).parameters.total == pytest.approx(65e6, rel=0.04)
    assert config.layers[0].attention.num_heads == 8


def test_a_task_head_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a task head needs a pooling, labels or a transform"):
        TaskHeadConfig()
