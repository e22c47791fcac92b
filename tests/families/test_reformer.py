"""Reformer beyond the harness: texts of every length, in evaluation, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Case, all_cases

import polyhead as ph
from polyhead.checkpoints import load_checkpoint
from polyhead.config import (
    AttentionConfig,
    AxialConfig,
    EmbeddingConfig,
    LshAttentionConfig,
    ReversibleConfig,
)
from polyhead.errors import ConfigError, ContextLengthError, UnsupportedError
from polyhead.families import read_config
from polyhead.layers import LshAttention
from polyhead.layers.positions import AxialPositions
from polyhead.models import Transformer
from polyhead.models.embedding import Embedding

CASE: Case = all_cases()["reformer"]
HASHED = {"attn_layers": ["lsh", "local", "lsh"], "num_hashes": 2}
LSH = LshAttentionConfig(2, 2, 8, chunk_length=4, num_buckets=(2, 4), num_hashes=2)


def pair(folder: Path, options: dict[str, Any], case: Case = CASE) -> tuple[Any, Transformer]:
    theirs = case.build(options).eval()
    theirs.save_pretrained(folder)
    return theirs, load_checkpoint(folder).model


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        HASHED,
        {"attn_layers": ["local", "local"]},
        {"attn_layers": ["lsh", "lsh"], "num_hashes": 3, "lsh_num_chunks_before": 2},
        # Chunks of both kinds make whole ones of 20.
        {"attn_layers": ["lsh", "local"], "lsh_attn_chunk_length": 5, "axial_pos_shape": [10, 6]},
        # Few chunks, and further back than there are.
        {
            "attn_layers": ["lsh"],
            "lsh_attn_chunk_length": 8,
            "num_buckets": [2, 4],
            "lsh_num_chunks_before": 4,
        },
    ],
    ids=["both", "local", "hashed", "long", "few"],
)
def test_a_text_of_any_length_has_the_logits_of_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    theirs, ours = pair(tmp_path, options)
    exact = theirs.double()
    for length in range(1, 25):
        ids = CASE.ids()[:, :length]
        wanted = exact(ids).logits
        torch.testing.assert_close(ours(ids).double(), wanted, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_body_gives_both_streams_side_by_side(tmp_path: Path) -> None:
    theirs, ours = pair(tmp_path, HASHED, replace(CASE, auto="AutoModel"))
    wanted = theirs.double()(CASE.ids()).last_hidden_state
    assert wanted.shape[-1] == 64 == ours.config.hidden_dim
    torch.testing.assert_close(ours(CASE.ids()).double(), wanted, atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "dense", "paged"])
def test_local_layers_have_every_cache(kind: Any, tmp_path: Path) -> None:
    _, ours = pair(tmp_path, {"attn_layers": ["local"] * 2, "local_num_chunks_before": 2})
    ids, cache = CASE.ids(), ours.new_cache(kind=kind)
    parts = [ours(part, cache=cache) for part in ids.split([7, 1, 1, 6, 8, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), ours(ids), atol=1e-5, rtol=1e-4)
    if kind == "auto":  # a ring of the chunk that a query is in and those before it
        assert cache.layers[0].capacity == 12
    planned = ph.plan(ours.config, tokens=24, batch_size=2, kv_dtype="float32")
    assert planned.parameters == ours.parameter_counts()


def lsh(seed: int = 0, **options: Any) -> LshAttention:
    torch.manual_seed(0)
    return LshAttention.from_config(16, replace(LSH, hash_seed=seed, **options)).eval()


@torch.no_grad()
def test_a_seed_decides_the_hashes_and_torchs_generator_does_not_matter() -> None:
    x = torch.randn(2, 40, 16)
    layer, other = lsh(5), lsh(6)
    first, state = layer(x, mask=ph.Causal()), torch.get_rng_state()
    assert torch.equal(layer(x, mask=ph.Causal()), first)
    assert not torch.allclose(other(x, mask=ph.Causal()), first, atol=1e-3)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_chunk_is_causal_attention_that_leaves_out_the_token_itself() -> None:
    layer, x = lsh(), torch.randn(2, 4, 16)
    q = layer.q_proj(x).view(2, 4, 2, 8).transpose(1, 2)
    v = layer.v_proj(x).view(2, 4, 2, 8).transpose(1, 2)
    k = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(4, 4).triu().bool(), -torch.inf)
    heads = torch.cat((v[:, :, :1], scores[:, :, 1:].softmax(-1) @ v), dim=2)
    wanted = layer.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=ph.Causal()), wanted)


def test_what_needs_more_than_one_whole_text_is_refused_by_name(tmp_path: Path) -> None:
    layer, x = lsh(), torch.randn(2, 8, 16)
    causal = ph.Causal()
    given: dict[str, dict[str, Any]] = {
        "a context": {"context": x},
        "a cache": {"cache": ph.DenseCache()},
        "positions": {"positions": torch.arange(8)},
        "a bias": {"bias": torch.zeros(8, 8)},
    }
    for name, options in given.items():
        with pytest.raises(UnsupportedError, match=f"by hashes of all of its tokens: got {name}"):
            layer(x, mask=causal, **options)
    for mask in (None, causal & ph.KeyLengths(torch.tensor([8, 5]))):
        with pytest.raises(UnsupportedError, match=r"no mask but Causal\(\), so give texts"):
            layer(x, mask=mask)
    with (
        layer.register_attention_hook(lambda record: None),
        pytest.raises(UnsupportedError, match="got hooks"),
    ):
        layer(x, mask=causal)
    _, ours = pair(tmp_path, HASHED)
    with pytest.raises(UnsupportedError, match=r"layer 0, LSH MHA, has no cache: later tokens"):
        ours.new_cache()
    with pytest.raises(ConfigError, match="LshAttentionConfig has no cache to plan: later tokens"):
        ph.plan(ours.config, tokens=24)
    with pytest.raises(UnsupportedError, match="no mask but Causal"):
        ours(CASE.ids(), mask=ph.KeyLengths(torch.tensor([24, 5])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hash_seed": None}, "hash_seed is None.*draws other hashes in every call"),
        ({"num_buckets": None}, "num_buckets is None.*the first text that a layer reads"),
        ({"num_buckets": [2, 3]}, r"num_buckets must be even numbers: got \(2, 3\)"),
        ({"is_decoder": False}, "is_decoder is False; supported is true"),
        ({"attn_layers": ["local", "full"]}, "attn_layers is .*'local' and 'lsh'"),
        ({"lsh_num_chunks_after": 1}, "lsh_num_chunks_after is 1; supported is 0"),
        ({"axial_pos_shape": [2, 3, 4]}, r"axial_pos_shape is \[2, 3, 4\]; supported is 2 numbers"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5; supported is 2"),
    ],
)
def test_keys_that_are_not_understood_are_refused(options: dict[str, Any], message: str) -> None:
    values = CASE.config().to_dict() | options
    with pytest.raises(ConfigError, match=message):
        read_config(values, "config.json")


def test_without_layers_that_hash_their_keys_may_be_absent() -> None:
    values = CASE.config({"attn_layers": ["local"]}).to_dict()
    values |= {"hash_seed": None, "num_buckets": None}
    assert read_config(values, "config.json").layers[0].attention.kind == "heads"


def test_axial_positions_are_rows_beside_columns() -> None:
    table = AxialPositions(AxialConfig((3, 4), (2, 5)))
    whole = table(0, 12)
    assert whole.shape == (12, 7)
    assert torch.equal(whole[6], torch.cat((table.rows[1], table.columns[2])))
    assert torch.equal(table(torch.tensor([[11, 6]]), 2), whole[[11, 6]][None])
    with pytest.raises(ContextLengthError, match=r"3 · 4 axial positions: got tokens up to .* 12"):
        table(7, 6)


def test_configurations_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunks_before need a chunk"):
        AttentionConfig(2, 2, 8, chunks_before=1)
    with pytest.raises(ConfigError, match="reversible layers have 2 streams: got count=3"):
        ReversibleConfig(3)
    with pytest.raises(ConfigError, match="axial belongs to positions 'axial'"):
        EmbeddingConfig("axial")
    with pytest.raises(ConfigError, match=r"a key and a value each.*num_kv_heads=1"):
        replace(LSH, num_kv_heads=1)
    with pytest.raises(ConfigError, match="heads that hash go without sinks"):
        replace(LSH, sinks=True)
    shape = EmbeddingConfig("axial", axial=AxialConfig((3, 4), (2, 5)))
    with pytest.raises(ConfigError, match="axial dims must sum to 16 features"):
        Embedding(9, 16, 12, shape)
