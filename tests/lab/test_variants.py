"""Variants: their names, and that their decoders have equal parameters."""

import pytest

from polyhead.errors import ConfigError, InputError
from polyhead.lab.comparison.variants import Sizes, decoder, parameters, variant, variants
from polyhead.models import Transformer

SIZES = Sizes(64, 2, 8, 192, 300)
NAMES = ["gqa:4", "gqa:2", "mqa", "mla:32+4", "window:64", "heads:1", "heads:32", "gated", "diff",
         "nsa:4", "dsa:9", "gdn", "kda", "mamba2", "hybrid:1+1"]  # fmt: skip


@pytest.mark.parametrize("sizes", [SIZES, Sizes(128, 3, 4, 352, 1024)])
def test_parameters_are_those_of_mha_within_half_a_hidden_feature_of_each_layer(sizes):
    wanted = parameters(decoder(variant("mha"), sizes))
    for name in NAMES:
        config = decoder(variant(name), sizes)
        assert parameters(config) == sum(p.numel() for p in Transformer(config).parameters())
        assert abs(parameters(config) - wanted) <= 3 * sizes.embed_dim * sizes.layers / 2, name


def test_layouts_are_those_that_the_names_say():
    def told(name):
        return decoder(variant(name), SIZES).layers[0].attention.described

    assert told("mha") == "MHA 8 query / 8 kv heads × 8"
    assert told("gqa:2") == "GQA-2 8 query / 2 kv heads × 8"
    assert told("mqa") == "MQA 8 query / 1 kv heads × 8"
    assert told("mla:32+4") == "MLA 8 heads, latent 32 + 4"
    assert told("heads:2") == "MHA 2 query / 2 kv heads × 32"
    assert decoder(variant("window:64"), SIZES).layers[1].attention.window == 64
    assert told("nsa:4").startswith("NSA MHA 8 query / 8 kv heads × 8, 4 blocks of 16 keys")
    assert told("dsa:9").startswith("MLA 8 heads, latent 32 + 4, the 9 keys")
    assert told("kda") == "Kimi delta attention 8 states of 8 × 8"
    assert told("mamba2") == "Mamba-2 8 states of 16 × 8"
    hybrid = decoder(variant("hybrid:3+1"), Sizes(64, 6, 8, 192, 300)).layers
    assert [layer.attention.layout for layer in hybrid] == [
        *["gated DeltaNet"] * 3, "MHA", *["gated DeltaNet"] * 2,
    ]  # fmt: skip


def test_feed_forward_networks_are_widened_and_narrowed():
    widths = {
        name: decoder(variant(name), SIZES).layers[0].feed_forward.hidden_dim
        for name in ("mha", "window:9", "mqa", "mla:96+16")
    }
    assert widths["mha"] == widths["window:9"] == 192
    assert widths["mqa"] > 192 > widths["mla:96+16"]


def test_mha_comes_first_whether_it_is_named_or_not():
    for names in ("mqa, GQA:2", "mqa,mha,gqa:2"):
        assert [each.name for each in variants(names, SIZES)] == ["mha", "mqa", "gqa:2"]
    assert variant("mla:32+4").slug == "mla-32-4"


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ("gqa:3", ConfigError, r"num_kv_heads must divide num_heads.*use one of \[1, 2, 4, 8\]"),
        ("heads:3", ConfigError, "heads must divide embed_dim=64"),
        ("heads:64", ConfigError, "even numbers of features"),
        ("window:0", InputError, "at least 1: got 'window:0'"),
        ("gqa:0", InputError, "at least 1: got 'gqa:0'"),
        ("mla:32", InputError, "no variant 'mla:32'.*mla:R"),
        ("mla:32+3", ConfigError, "qk_rope_head_dim must be even"),
        ("mla:9999+8", ConfigError, "nothing is left for its feed-forward"),
        ("hybrid:3", InputError, "hybrid:N.M"),
        ("nsa:2", ConfigError, "top_k must be at least first_blocks .* last_blocks=3"),
        ("dsa:0", InputError, "at least 1: got 'dsa:0'"),
        ("flash", InputError, "no variant 'flash'"),
        ("", InputError, "no variant ''"),
        ("mqa,mqa", InputError, "named twice"),
        ("mha", InputError, "name a variant to compare with mha"),
    ],
)
def test_variants_that_cannot_be_are_refused_by_name(names, error, words):
    with pytest.raises(error, match=words):
        variants(names, SIZES)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="heads must divide embed_dim=64"):
        Sizes(64, 2, 7)
    with pytest.raises(ConfigError, match="vocab_size must be a whole number of at least 257"):
        Sizes(vocab_size=256)
