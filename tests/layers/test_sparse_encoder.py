"""Attention over parts of keys: what hooks are shown is what was computed; calls are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyhead as ph
from allocations import measured
from polyhead.config import (
    AttentionConfig,
    BlockSumsAttentionConfig,
    BottleneckAttentionConfig,
    ConvolvedHeadsConfig,
    ExclusiveAttentionConfig,
    FeedForwardConfig,
    GlobalBlocksAttentionConfig,
    GlobalPrefixAttentionConfig,
    GlobalWindowAttentionConfig,
    LayerConfig,
    NormConfig,
    RelativeBiasConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.record import AttentionRecord
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer

E, T = 24, 40
SIZES = 4, 2, 6
WINDOW = {"window": 4, "window_ahead": 3}
LAYOUTS = {
    "global window": GlobalWindowAttentionConfig(*SIZES, **WINDOW, global_first=True),
    "block sums": BlockSumsAttentionConfig(
        *SIZES, **WINDOW, block_size=4, sums_bias=RelativeBiasConfig(8, 12)
    ),
    "bottleneck": BottleneckAttentionConfig(
        *SIZES, dim=10, networks=(FeedForwardConfig(12), FeedForwardConfig(7, gated=False))
    ),
    "convolved": ConvolvedHeadsConfig(4, 4, 6, width=5),
    "exclusive": ExclusiveAttentionConfig(*SIZES, **WINDOW),
    "global blocks": GlobalBlocksAttentionConfig(*SIZES, block_size=3, first_again=2),
    "global prefix": GlobalPrefixAttentionConfig(*SIZES, chunk=8, stagger=4, prefix=3),
}


PADDED = ["global window", "block sums", "bottleneck", "convolved", "exclusive"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_are_shown_one_softmax_over_all_parts(name: str) -> None:
    torch.manual_seed(0)
    layer = build_attention(E, LAYOUTS[name]).eval()
    x, seen = torch.randn(2, T, E), []
    mask = ph.KeyLengths([T - 3, 30])
    with torch.no_grad():
        alone = layer(x, mask=mask)
        with layer.register_attention_hook(seen.append):
            watched = layer(x, mask=mask)
        assert torch.equal(alone, watched)
        record = seen[0]
        again, lse = ph.attention(
            record.q, record.k, record.v, mask=record.mask, bias=record.bias, scale=record.scale,
            kernel="reference", return_lse=True,
        )  # fmt: skip
    assert len(seen) == 1
    real = slice(0, 27)  # of both rows, whatever stands before the tokens
    torch.testing.assert_close(record.out[:, :, real], again[:, :, real])
    torch.testing.assert_close(record.lse[:, :, real], lse[:, :, real])


@pytest.mark.parametrize("name", PADDED)
def test_a_text_beside_padding_has_the_result_that_it_has_alone(name: str) -> None:
    torch.manual_seed(0)
    layer, x = build_attention(E, LAYOUTS[name]).eval(), torch.randn(2, T, E)
    with torch.no_grad():
        padded = layer(x, mask=ph.KeyLengths([T, 30]))[1:, :30]
        torch.testing.assert_close(padded, layer(x[1:, :30]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_masks_and_caches_are_refused(name: str) -> None:
    layer = build_attention(E, LAYOUTS[name])
    x = torch.randn(1, T, E)
    with pytest.raises(UnsupportedError, match="no mask but KeyLengths"):
        layer(x, mask=ph.Causal())
    with pytest.raises(UnsupportedError, match="counted from 0: got cache"):
        layer(x, cache=ph.DenseCache())


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_matrix_of_all_pairs_is_made(name: str) -> None:
    config, tokens = LAYOUTS[name], 4096
    if isinstance(config, GlobalBlocksAttentionConfig):
        config = replace(config, block_size=64)  # of all pairs of blocks there is a matrix
    layer = build_attention(E, config).eval()
    x = torch.randn(1, tokens, E)
    with torch.no_grad():
        most, _ = measured(lambda: layer(x, mask=ph.KeyLengths(tokens - 10)))
    assert most < tokens * tokens / 2  # where a matrix of bool has a byte for each


def test_global_tokens_are_checked() -> None:
    network = FeedForwardConfig(16)
    given = {"vocab_size": 9, "embed_dim": E, "max_positions": 64}

    def model(heads: AttentionConfig) -> Transformer:
        layers = (LayerConfig(heads, network),)
        return Transformer(TransformerConfig("encoder", layers=layers, **given))

    ids = torch.zeros(2, 5, dtype=torch.long)
    heads = LAYOUTS["global window"]
    assert isinstance(heads, AttentionConfig)
    with pytest.raises(TypeError, match="global_tokens must be a tensor of bool"):
        model(heads)(ids, global_tokens=ids)
    with pytest.raises(ValueError, match=r"global_tokens must be \[B, T\] = \[2, 5\]"):
        model(heads)(ids, global_tokens=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="no layer has one"):
        model(AttentionConfig(4, 2, 6))(ids, global_tokens=ids.bool())


def test_heads_in_a_bottleneck_are_their_formula() -> None:
    torch.manual_seed(0)
    config = LAYOUTS["bottleneck"]
    assert isinstance(config, BottleneckAttentionConfig)
    x = torch.randn(2, 7, E)
    for wide in (True, False):
        config = replace(config, values_from_wide=wide)
        layer = build_attention(E, config).eval()
        n = layer.narrow(x)
        s, values = (layer.for_scores(x), x) if wide else (n, n)
        q, k, v = (
            made.view(2, 7, -1, 6).transpose(1, 2)
            for made in (layer.q_proj(s), layer.k_proj(s), layer.v_proj(values))
        )
        heads = ph.attention(q, k, v, kernel="reference").transpose(1, 2).flatten(2)
        h = layer.heads_norm(layer.o_proj(heads) + n)
        for each in layer.networks:
            h = each.norm(each.feed_forward(h) + h)
        torch.testing.assert_close(layer(x), layer.wide_proj(h))
        config = replace(config, networks=())
        assert BottleneckAttentionConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="bottleneck dim"):
        BottleneckAttentionConfig(*SIZES)
    for wrong in ({"sinks": True}, WINDOW):
        with pytest.raises(ConfigError, match="heads in a bottleneck"):
            replace(config, **wrong)


def test_what_convolved_heads_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="need an odd width: got 4"):
        ConvolvedHeadsConfig(4, 4, 6, width=4)
    for wrong in ({"num_kv_heads": 2}, {"v_head_dim": 5}, WINDOW):
        with pytest.raises(ConfigError, match="keys and values each"):
            replace(ConvolvedHeadsConfig(4, 4, 6), **wrong)
    with pytest.raises(ConfigError, match="go without sinks"):
        ConvolvedHeadsConfig(4, 4, 6, sinks=True)


def test_exclusive_heads_have_nothing_along_their_own_values() -> None:
    torch.manual_seed(0)
    layer, x = build_attention(E, LAYOUTS["exclusive"]).eval(), torch.randn(2, T, E)
    seen: list[AttentionRecord] = []
    given: list[torch.Tensor] = []

    def keep(heads: torch.Tensor) -> torch.Tensor:
        given.append(heads)
        return heads

    layer.register_attention_hook(seen.append)
    with torch.no_grad(), layer.register_head_edit(keep):
        layer.gate_proj.weight.zero_()  # gates of a half
        layer(x)
        layer.exclusion.fill_(20.0)
        layer(x)
    torch.testing.assert_close(2 * given[0], seen[0].out)  # α is 0 at first
    own = seen[1].v.repeat_interleave(2, dim=1)
    along = (2 * given[1] * own).sum(dim=-1)
    torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-5, rtol=0.0)
    rest = 2 * given[1] - seen[1].out
    torch.testing.assert_close(
        torch.linalg.vecdot(rest, own).abs(), rest.norm(dim=-1) * own.norm(dim=-1)
    )


def test_ids_add_to_values_from_a_table_that_layers_share() -> None:
    torch.manual_seed(0)
    norm = NormConfig(weight=False)
    heads = ExclusiveAttentionConfig(*SIZES, value_vocab_size=9, mix_norm=norm)
    second = replace(heads, value_table_of=0)
    layers = tuple(
        LayerConfig(each, FeedForwardConfig(16), norm, attention_norm=False)
        for each in (heads, second)
    )
    config = TransformerConfig("encoder", 9, E, 64, layers, head=None)
    assert TransformerConfig.from_json(config.to_json()) == config
    model, ids, seen = Transformer(config).eval(), torch.tensor([[3, 8, 3]]), []
    table = model.layers[0].attention.value_table
    assert model.layers[1].attention.value_table is table
    for layer in model.layers:
        layer.attention.register_attention_hook(seen.append)
    with torch.no_grad():
        model.layers[1].attention.mix.copy_(torch.tensor([0.0, 1.0]))
        model(ids)
        added = table(ids).view(1, 3, 2, 6).transpose(1, 2)
        x = model.embedding(ids)
        # The stream is the embedding in the first layer; the second reads the embedding alone.
        for layer, record in zip(model.layers, seen, strict=True):
            n = layer.attention.mix_norm(x)
            plain = layer.attention.v_proj(n).view(1, 3, 2, 6).transpose(1, 2)
            torch.testing.assert_close(record.v, plain + added)
    with pytest.raises(ValueError, match="reads the embedded of the embedding: call it within"):
        model.layers[0](x)
    with pytest.raises(ConfigError, match="value_table_of needs a value_vocab_size"):
        replace(second, value_vocab_size=None)
    with pytest.raises(ConfigError, match="a table of 9 rows for 2 kv heads"):
        replace(
            config, layers=(replace(layers[0], attention=replace(heads, v_head_dim=4)), layers[1])
        )
    with pytest.raises(ConfigError, match="exclusive heads go without sinks"):
        replace(heads, sinks=True)


def test_a_window_with_global_tokens_is_an_encoders() -> None:
    with pytest.raises(ConfigError, match="give window_ahead"):
        GlobalWindowAttentionConfig(*SIZES, window=4)
    with pytest.raises(ConfigError, match="need a window"):
        GlobalWindowAttentionConfig(*SIZES)
