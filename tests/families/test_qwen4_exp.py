"""Qwen4-Exp's files: tables in shards or whole, numbers that follow, keys that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import all_cases
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import read_config

CASE = all_cases()["qwen4_exp_text"]
_HASHES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _written(folder: Path) -> dict[str, Tensor]:
    CASE.build().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def test_tables_are_read_whole_and_numbers_may_be_absent(tmp_path: Path) -> None:
    tensors, table = _written(tmp_path), "model.layers.2.ple.ple_embedding.ngram_embedding"
    shards = [name for name in tensors if name.startswith(table)]
    assert len(shards) == 5
    wanted = load_checkpoint(tmp_path).model(CASE.ids())
    whole = torch.cat([tensors.pop(f"{table}.shard_{i}.weight") for i in range(5)])
    kept = {name: each for name, each in tensors.items() if not name.endswith(_HASHES)}
    save_file({**kept, f"{table}.weight": whole}, tmp_path / "model.safetensors")
    assert torch.equal(load_checkpoint(tmp_path).model(CASE.ids()), wanted)


@pytest.mark.parametrize("name", _HASHES)
def test_numbers_of_other_hashes_are_refused(name: str, tmp_path: Path) -> None:
    tensors = _written(tmp_path)
    tensors[f"model.layers.0.ple.ple_embedding.{name}"][-1] += 2
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.*must be what follows from the config"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ple_layer_ids", [2], "ple_layer_ids is 2; supported is numbers of linear_attention"),
        ("ple_layer_ids", [0], r"ple_layer_ids is \[0\]; supported is numbers from 1 to 4"),
        ("ple_embed_dim", 25, r"dim must be a multiple of the 6 hashes of runs"),
        ("eos_token_id", None, "eos_token_id is None; supported is the id that ends runs"),
        ("ngram_vocab_size_base", 10**12, "table_rows must be a whole number from 1 to"),
        ("split_ngram_parts", 10**6, "split_ngram_parts is 1000000; supported is 1 to 16384"),
        ("indexer_budget", 13, "indexer_budget is 13; supported is multiples of"),
        ("indexer_kv_heads", 2, "indexer_kv_heads is 2"),
        ("indexer_head_dim", None, "indexer_head_dim is None; supported is a number beside"),
        ("output_gate_type", "tanh", "output_gate_type is 'tanh'; supported is silu, sigmoid"),
        ("hc_count", 1, "streams count must be a whole number"),
        (
            "rope_parameters",
            {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
            "rope_type is 'dynamic'; supported is a type whose frequencies do not depend on the",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(key: str, value: Any, words: str) -> None:
    values = json.loads(CASE.config().to_json_string())
    with pytest.raises(ConfigError, match=words):
        read_config(values | {key: value}, "config.json")


def test_full_attention_needs_the_indexers_sizes() -> None:
    values = json.loads(CASE.config().to_json_string())
    names = [name for name in values if name.startswith("indexer_")]
    with pytest.raises(ConfigError, match="indexer_n_heads is None; supported is the indexer's"):
        read_config(values | dict.fromkeys(names), "config.json")
