"""Engrams: transformers' module, every cache, padding, models of other streams, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp
from whole_models import check_decoding, check_fork, check_padded_rows

import polyhead as ph
from polyhead.caches import LayerCache
from polyhead.config import (
    AttentionConfig,
    EngramConfig,
    FeedForwardConfig,
    LayerConfig,
    LowRankConnectionsConfig,
    MixedConnectionsConfig,
    NormConfig,
    RopeConfig,
    StreamsConfig,
    TransformerConfig,
)
from polyhead.config.layout import EMBEDDING, TOKENS
from polyhead.errors import ConfigError
from polyhead.layers import Engram
from polyhead.layers.handed import Handed
from polyhead.models import Transformer

E, n, W, END, CAUSAL = 16, 3, 11, 4, ph.Causal()
CONFIG = EngramConfig(
    streams=n, width=E, vocab_size=W, end_token_id=END, dim=24, longest=4, heads=2,
    table_rows=40, divisor=16, seed=7, index=1, conv_kernel=3,
    norm=NormConfig(eps=0.01, weight_offset=1.0),
)  # fmt: skip


def layer(dtype: torch.dtype = torch.float64) -> Engram:
    torch.manual_seed(0)
    made = Engram.from_config(E, CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.to(dtype).eval()


def ids_of(B: int, T: int) -> Tensor:
    return torch.randint(W, (B, T), generator=torch.Generator().manual_seed(3))


def handed(ids: Tensor) -> Handed:
    return Handed(0, {(EMBEDDING, TOKENS): ids})


class OfVectors:
    """The layer, whose ids are made of its input, so that shared tests can give vectors."""

    def __init__(self, mine: Engram) -> None:
        self.mine, self.config, self.embed_dim = mine, mine.config, mine.embed_dim

    def __call__(self, x: Tensor, **call: Any) -> Tensor:
        known = x[..., 0].where(x[..., 0].isfinite(), 0)
        ids = (known * 1000).long() % W
        return self.mine(x, handed=handed(ids), **call)


def theirs_of(mine: Engram) -> torch.nn.Module:
    c = mine.config
    config = Qwen4ExpTextConfig(
        vocab_size=W, hidden_size=E, hc_count=n, ple_embed_dim=c.dim, ngram_size=c.longest,
        heads_per_ngram=c.heads, ngram_vocab_size_base=c.table_rows, seed=c.seed,
        make_ngram_vocab_size_divisible_by=c.divisor, ple_conv_kernel_size=c.conv_kernel,
        rms_norm_eps=c.norm.eps, eos_token_id=[END, 2], num_hidden_layers=2, ple_layer_ids=[1, 2],
        layer_types=["linear_attention"] * 2,
    )  # fmt: skip
    other = qwen4_exp.Qwen4ExpTextPLELayer(config, 1, c.index).double()
    names = {
        "ple_embedding.ngram_embedding.weight": mine.table.weight,
        "key_proj.weight": mine.k_proj.weight,
        "value_proj.weight": mine.v_proj.weight,
        "norm_key.weight": mine.k_norm.weight.flatten(),
        "norm_query.weight": mine.q_norm.weight.flatten(),
        "norm_conv.weight": mine.conv_norm.weight.flatten(),
        "conv1d.weight": mine.conv_weight[:, None],
    }
    missing, _ = other.load_state_dict(names, strict=False)
    assert all(name.startswith("ple_embedding.") for name in missing)  # the hashes' numbers
    return other


def test_it_is_transformers_module_with_gradients():
    mine = layer()
    other, x, ids = theirs_of(mine), torch.randn(2, 60, n * E).double(), ids_of(2, 60)
    assert int((ids == END).sum()) > 5
    found, wanted = mine(x, mask=CAUSAL, handed=handed(ids)), other(x, ids, None)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # their norms are in float32
    for ours, theirs in (
        ("table.weight", "ple_embedding.ngram_embedding.weight"),
        ("k_proj.weight", "key_proj.weight"),
        ("conv_weight", "conv1d.weight"),
        ("q_norm.weight", "norm_query.weight"),
    ):
        pairs = (found, mine.get_parameter(ours)), (wanted, other.get_parameter(theirs))
        one, two = (
            torch.autograd.grad(y.square().sum(), weight, retain_graph=True)[0].flatten()
            for y, weight in pairs
        )
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("index", [0, 2])
def test_published_sizes_have_transformers_primes_and_multipliers(index):
    config = EngramConfig(
        streams=4, width=2048, vocab_size=248_320, end_token_id=0, dim=2048, index=index
    )
    first = index * 16 + 1
    primes = [qwen4_exp._find_nth_prime_after(19_999_999, first + j) for j in range(16)]
    assert [*config.sizes] == primes
    assert config.rows % 128 == 0
    assert 0 <= config.rows - sum(primes) < 128
    built = qwen4_exp._build_layer_multipliers(248_320, 3, index, 1234)
    assert [*config.multipliers] == built.tolist()


def test_runs_do_not_reach_beyond_the_end_of_a_text():
    mine = layer()
    ids = torch.tensor([[5, 6, END, 7, 8, 9], [1, 3, END, 7, 8, 9]])
    found = mine._rows(torch.nn.functional.pad(ids, (3, 0), value=END))
    assert torch.equal(found[0, 3:], found[1, 3:])
    assert (found[0, 2, 2:] != found[1, 2, 2:]).any()  # the end is of the text that it ends
    short = mine._rows(torch.nn.functional.pad(ids[:, 3:], (3, 0), value=END))
    assert torch.equal(short, found[:, 3:])
    assert int(found.min()) >= 0
    assert int(found.max()) < mine.config.rows


@torch.no_grad()
def test_a_cache_equals_one_pass_forked_rolled_back_and_reordered():
    mine = OfVectors(layer())
    x = torch.randn(3, 31, n * E, generator=torch.Generator().manual_seed(1)).double()
    held = LayerCache(mine.config.memories, spare=7)
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL))
    check_fork(mine, x, held, atol=1e-9, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(cached):
    check_padded_rows(OfVectors(layer()), cached)


@torch.no_grad()
def test_bits_do_not_depend_on_chunks_or_neighbours_in_batch_invariant_mode():
    mine = OfVectors(layer(torch.float32))
    x = torch.randn(2, 23, n * E, generator=torch.Generator().manual_seed(1))
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 13], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def model(streams: StreamsConfig) -> Transformer:
    engram = dataclasses.replace(CONFIG, vocab_size=50)
    heads = AttentionConfig(4, 2, 8, rope=RopeConfig())
    layers = (
        LayerConfig(engram, None, streams=streams),
        LayerConfig(heads, FeedForwardConfig(24), streams=streams),
        LayerConfig(dataclasses.replace(engram, index=0), None, streams=streams),
    )
    config = TransformerConfig("decoder", 50, E, 64, layers)
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    made = Transformer(config).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
@pytest.mark.parametrize(
    "streams",
    [LowRankConnectionsConfig(n, 5), MixedConnectionsConfig(n)],
    ids=["low rank", "mixed"],
)
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(streams, kind, tmp_path):
    check_decoding(model(streams), kind, tmp_path)


@torch.no_grad()
def test_rows_of_different_lengths_decode_as_alone():
    mine, ids = model(LowRankConnectionsConfig(n, 5)), ids_of(2, 20)
    alone = [mine(ids[:1, :20])[:, 13:], mine(ids[1:, :17])[:, 16:]]
    cache = mine.new_cache()
    positions = torch.arange(16).expand(2, 16).clone()
    positions[0] = torch.where(positions[0] < 3, -1, positions[0] - 3)
    first = torch.stack((torch.nn.functional.pad(ids[0, :13], (3, 0)), ids[1, :16]))
    mine(first, positions=positions, cache=cache)
    packed = torch.cat((ids[0, 13:20], ids[1, 16:17]))[None]
    found = mine(packed, cache=cache, counts=[7, 1])
    torch.testing.assert_close(found[:, :7], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, 7:], alone[1], atol=1e-5, rtol=1e-5)


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer(), torch.randn(1, 3, n * E).double()
    with pytest.raises(ValueError, match="reads the tokens of the embedding: call it within its"):
        mine(x, mask=CAUSAL)
    with pytest.raises(ConfigError, match="width must be embed_dim=8: got 16"):
        Engram.from_config(8, CONFIG)
    with pytest.raises(ConfigError, match=r"dim must be a multiple of the 6 hashes.*got 25"):
        dataclasses.replace(CONFIG, dim=25)
    with pytest.raises(ConfigError, match="longest must be a whole number from 2 to 64: got 1"):
        dataclasses.replace(CONFIG, longest=1)
    with pytest.raises(ConfigError, match="table_rows must be a whole number from 1 to"):
        dataclasses.replace(CONFIG, table_rows=1 << 40)
    with pytest.raises(ConfigError, match=r"at most 4096 tables in all layers: got 6 in layer 999"):
        dataclasses.replace(CONFIG, index=999)
    with pytest.raises(ConfigError, match="conv_kernel must be a whole number"):
        dataclasses.replace(CONFIG, conv_kernel=1)
    with pytest.raises(ConfigError, match="an engram has one head and no rope"):
        dataclasses.replace(CONFIG, rope=RopeConfig())
