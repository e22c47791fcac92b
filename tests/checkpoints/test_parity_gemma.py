"""Tiny random Gemma 3 models equal transformers' eager float32 past their windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_tiny import write_gguf
from hf_tiny import GEMMAS, Tiny, greedy, their_greedy

from polyhead.caches import StoredCache
from polyhead.checkpoints import load_checkpoint
from polyhead.errors import ConfigError
from polyhead.families import read_config
from polyhead.planning import plan


@pytest.mark.parametrize("tiny", GEMMAS.values(), ids=GEMMAS.keys())
@torch.no_grad()
def test_logits_past_the_window_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path)
    ours = load_checkpoint(tmp_path).model
    ids = tiny.ids()
    wanted = theirs(ids).logits
    assert (ours(ids) - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1, "the models' outputs are too small to tell them apart"


@pytest.mark.parametrize("chunks", [[1] * 60, [17, 1, 1, 30, 11], [60], [9, 9, 42], [8, 50, 2]])
@torch.no_grad()
def test_any_chunks_through_the_rings_equal_one_pass(chunks: list[int], tmp_path: Path) -> None:
    tiny = GEMMAS["gemma3, MQA"]
    theirs = tiny.save(tmp_path)
    ours = load_checkpoint(tmp_path).model
    ids = tiny.ids()
    cache = ours.new_cache()
    steps = torch.cat([ours(chunk, cache=cache) for chunk in ids.split(chunks, dim=1)], dim=1)
    assert (steps - theirs(ids).logits).abs().max() < 1e-4
    local, full = cache.layers[0], cache.layers[2]
    assert isinstance(local, StoredCache)
    # A window of 9 keys of 1 head × 16 in both rows; the full layer keeps all 60 tokens.
    assert local.used_bytes == 2 * 9 * 2 * 16 * 4
    assert full.used_bytes == 2 * 60 * 2 * 16 * 4


def test_greedy_tokens_past_the_window_equal_transformers(tmp_path: Path) -> None:
    tiny = GEMMAS["gemma3"]
    theirs = tiny.save(tmp_path)
    ids = tiny.ids()[:, :5]
    ours = load_checkpoint(tmp_path).model
    assert torch.equal(greedy(ours, ids, 40), their_greedy(theirs, ids, 40))


@pytest.mark.parametrize("tiny", GEMMAS.values(), ids=GEMMAS.keys())
def test_plan_equals_what_is_allocated(tiny: Tiny, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    model = load_checkpoint(tmp_path).model
    for source in (tmp_path, model.config):
        made = plan(source, tokens=40, batch_size=2, dtype="float32")
        cache = model.new_cache(capacity=40)
        with torch.no_grad():
            model(tiny.ids()[:, :40], cache=cache)
        assert made.cache_bytes == cache.bytes
        assert made.weight_bytes == sum(t.numel() * 4 for t in model.parameters())


@pytest.mark.parametrize("name", ["gemma3", "gemma3, scaled global rope"])
def test_the_older_spelling_of_rope_means_the_same(name: str, tmp_path: Path) -> None:
    GEMMAS[name].save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    ropes = values.pop("rope_parameters")
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    older = values | {
        "rope_theta": full.pop("rope_theta"),
        "rope_local_base_freq": local["rope_theta"],
        "rope_scaling": full if full["rope_type"] != "default" else None,
    }
    assert read_config(older, "config.json") == load_checkpoint(tmp_path).config


def test_windows_follow_from_the_pattern() -> None:
    values = json.loads(GEMMAS["gemma3"].build().config.to_json_string())
    del values["layer_types"]
    config = read_config(values | {"sliding_window_pattern": 2}, "config.json")
    assert [layer.attention.window for layer in config.layers] == [9, None, 9, None]
    assert [layer.attention.rope.theta for layer in config.layers] == [1e4, 1e6, 1e4, 1e6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .* full_attention and"),
        ({"rope_local_base_freq": 1e4}, "key 'rope_local_base_freq' .*not understood"),
        ({"hidden_activation": "snake"}, "hidden_activation is 'snake'"),
        ({"rope_scaling": {"factor": 2.0}}, "key 'rope_scaling' .*not understood"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
            "rope type must be one of",
        ),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], words: str) -> None:
    values = json.loads(GEMMAS["gemma3"].build().config.to_json_string())
    with pytest.raises(ConfigError, match=words):
        read_config(values | change, "config.json")


@pytest.mark.parametrize("spare", [{}, {"attention.sliding_window_pattern": 3}])
@torch.no_grad()
def test_gguf_files_equal_the_directory(spare: dict[str, int], tmp_path: Path) -> None:
    pattern = spare.get("attention.sliding_window_pattern", 6)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(7)]
    options = GEMMAS["gemma3"].options | {
        "num_hidden_layers": 7, "layer_types": kinds, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    tiny = Tiny("Gemma3Text", options, tokens=60)
    theirs = tiny.save(tmp_path)
    path = write_gguf(
        tmp_path / "x.gguf",
        theirs,
        attention__sliding_window=9,
        **{key.replace(".", "__"): value for key, value in spare.items()},
    )
    ours, directory = load_checkpoint(path), load_checkpoint(tmp_path)
    assert ours.config.layers == directory.config.layers
    ids = tiny.ids()
    assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4
