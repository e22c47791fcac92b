"""A funnel on texts of every short length, against transformers; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import polyhead as ph
from allocations import measured
from polyhead.checkpoints import load_checkpoint
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    FunnelAttentionConfig,
    FunnelConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.models import Transformer
from polyhead.planning import plan
from polyhead.planning.flops import flops

LAYER = LayerConfig(FunnelAttentionConfig(4, 4, 6), FeedForwardConfig(40), norm_placement="post")
CONFIG = TransformerConfig(
    "encoder", 50, 32, 64, (LAYER,) * 4, funnel=FunnelConfig((1, 1, 1), 1), head=None
)


@pytest.mark.parametrize(
    "options", [{}, {"truncate_seq": False, "pooling_type": "max"}, {"separate_cls": False}]
)
def test_texts_of_every_length_alone_and_beside_others(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.FunnelConfig(
        vocab_size=50, d_model=32, n_head=4, d_head=6, d_inner=40, block_sizes=[1, 1, 1, 1],
        num_decoder_layers=1, attention_type="factorized", **options,
    )  # fmt: skip
    theirs = transformers.FunnelModel(config).eval()
    for tensor in theirs.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path).model
    ids = torch.randint(1, 50, (12, 12))
    kinds = torch.arange(12).div(5, rounding_mode="floor").expand(12, 12)
    with torch.no_grad():
        together = ours(ids, mask=ph.KeyLengths([*range(1, 13)]), segments=kinds)
        for n in range(1, 13):
            text, kind = ids[n - 1 : n, :n], kinds[:1, :n]
            wanted = theirs(text, token_type_ids=kind).last_hidden_state
            torch.testing.assert_close(ours(text, segments=kind), wanted, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(together[n - 1 : n, :n], wanted, atol=2e-5, rtol=1e-4)


def test_what_is_under_padding_has_no_effect() -> None:
    torch.manual_seed(0)
    model, ids = Transformer(CONFIG).eval(), torch.randint(50, (2, 16))
    model.recompute = True
    lengths = ph.KeyLengths([16, 11])
    padded = model(ids, mask=lengths)
    other = ids.clone()
    other[1, 11:] = 7
    assert torch.equal(model(other, mask=lengths)[1, :11], padded[1, :11])
    padded[1, :11].sum().backward()
    assert all(tensor.grad is not None for tensor in model.parameters())


def test_layers_of_later_blocks_count_fewer_tokens() -> None:
    given: Any = {"queries": 64, "cached": 0, "batch_size": 1}
    found = flops(CONFIG, **given).projections
    flat = replace(CONFIG, funnel=FunnelConfig((1,), 3))
    assert FunnelConfig((2, 2), 1).strides == (1, 1, 1, 2, 1)
    assert FunnelConfig((2, 2), None, queries_only=False).strides == (1, 1, 2, 2)
    # Strides 1, 1, 2 and 1: three layers and a half of four.
    assert found / flops(flat, **given).projections == 3.5 / 4
    assert TransformerConfig.from_json(CONFIG.to_json()) == CONFIG


def test_a_funnel_allocates_what_is_planned() -> None:
    heads = FunnelAttentionConfig(8, 8, 32)
    layers = (replace(LAYER, attention=heads),) * 3
    funnel = FunnelConfig((1, 1), 1)
    config = replace(CONFIG, embed_dim=256, max_positions=256, layers=layers, funnel=funnel)
    model, ids = Transformer(config).eval(), torch.zeros(2, 256, dtype=torch.long)
    with torch.no_grad():
        model(ids[:1], last=1)  # tests the native code
        allocated, _ = measured(lambda: model(ids, last=1))
    planned = plan(config, tokens=256, batch_size=2, dtype="float32").activation_bytes
    assert 0.7 * planned <= allocated <= planned


def test_a_funnel_refuses_by_name() -> None:
    model, ids = Transformer(CONFIG), torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="counts tokens from 0: got positions"):
        model(ids, positions=torch.arange(8))
    with pytest.raises(UnsupportedError, match="a funnel understands no mask but KeyLengths"):
        model(ids, mask=ph.Window(3))
    with pytest.raises(ValueError, match="reads the segments of the embedding"):
        model.layers[0](torch.zeros(1, 8, 32))
    plain = replace(LAYER, attention=AttentionConfig(4, 4, 6))
    for wrong in (
        {"layers": (LAYER,) * 3},
        {"layers": (plain, *(LAYER,) * 3)},
        {"funnel": None},
        {"kind": "decoder"},
    ):
        with pytest.raises(ConfigError, match=r"a funnel's layers|belong to kind 'encoder'"):
            replace(CONFIG, **wrong)
    for options, message in (
        ({"blocks": ()}, "needs blocks"),
        ({"blocks": (1, 0)}, "funnel blocks"),
        ({"blocks": (1,), "first_apart": False}, "truncate=True needs first_apart"),
    ):
        with pytest.raises(ConfigError, match=message):
            FunnelConfig(**options)
    with pytest.raises(ConfigError, match="biases of keys and values and every distance"):
        FunnelAttentionConfig(4, 4, 6, qkv_bias=True)
