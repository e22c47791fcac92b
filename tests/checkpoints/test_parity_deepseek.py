"""Whole DeepSeek-V2 and V3 models equal transformers' eager float32, through the converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import DEEPSEEKS, Tiny, greedy, their_greedy
from safetensors.torch import load_file, save_file

from polyhead.caches import ModelCache, StoredCache
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.config import MixtureConfig, TransformerConfig
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import read_config
from polyhead.models import Transformer
from polyhead.planning import plan

EACH = pytest.mark.parametrize("tiny", DEEPSEEKS.values(), ids=DEEPSEEKS.keys())
YARN = pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3", "deepseek v2, no q latent"])


@EACH
@torch.no_grad()
def test_logits_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path)
    ours = load_checkpoint(tmp_path)
    ids = tiny.ids()
    wanted, got = theirs(ids).logits, ours.model(ids)
    assert (got - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1, "the models' outputs are too small to tell them apart"


def in_chunks_and_steps(model: Transformer, ids: torch.Tensor) -> tuple[torch.Tensor, ModelCache]:
    """Logits of all tokens through a cache, 60 of them in three chunks, the rest one by one."""
    cache = model.new_cache()
    chunks = ids[:, :60].split([23, 1, 36], dim=1) + ids[:, 60:].split(1, dim=1)
    return torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1), cache


@YARN
@torch.no_grad()
def test_chunks_and_steps_through_latent_caches_equal_one_pass(name: str, tmp_path: Path) -> None:
    """In float64 exactly, in float32 as far as its rounding allows, which one pass measures.

    Logits reach ±5. One pass, its chunks and steps, and transformers' eager each lie 5e-6 to 1.1e-5
    from float64 at worst and 5e-7 to 7e-7 on average, so two of them may lie 1e-5 apart.
    """
    tiny = DEEPSEEKS[name]
    theirs = tiny.save(tmp_path)
    ids = tiny.ids()
    precise = load_checkpoint(tmp_path, dtype=torch.float64).model
    exact = precise(ids)
    assert (in_chunks_and_steps(precise, ids)[0] - exact).abs().max() < 1e-12
    ours = load_checkpoint(tmp_path).model
    steps, cache = in_chunks_and_steps(ours, ids)
    off, allowed = (steps - exact).abs(), (ours(ids) - exact).abs()
    assert off.mean() < 1.25 * allowed.mean() < 1.25e-6
    assert off.max() < 2 * allowed.max() < 4e-5
    assert (steps - theirs(ids).logits).abs().max() < 1e-4
    held = [layer.bytes for layer in ours.new_cache(capacity=90).layers]
    assert held == [0] * 3, "nothing is allocated before the first token"
    for layer in cache.layers:
        assert isinstance(layer, StoredCache)
        # The latent and the shared rotary key, of both rows; nothing per head.
        assert layer.used_bytes == 2 * 90 * (24 + 8) * 4


@pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3"])
def test_greedy_generation_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = DEEPSEEKS[name].save(tmp_path)
    prompt = DEEPSEEKS[name].ids()[:, :9]
    ours = load_checkpoint(tmp_path).model
    assert torch.equal(greedy(ours, prompt, 40), their_greedy(theirs, prompt, 40))


@EACH
def test_plan_equals_what_is_allocated(tiny: Tiny, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    model = load_checkpoint(tmp_path).model
    tensors = [*model.parameters(), *model.buffers()]
    for source in (tmp_path, model.config):
        made = plan(source, tokens=40, batch_size=2, dtype="float32")
        assert made.parameters == model.parameter_counts()
        assert made.weight_bytes == sum(t.numel() * t.element_size() for t in tensors)
        cache = model.new_cache(capacity=40)
        with torch.no_grad():
            model(tiny.ids()[:, :40], cache=cache)
        assert made.cache_bytes == cache.bytes


@EACH
def test_configuration_round_trips_through_json(tiny: Tiny, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    config = load_checkpoint(tmp_path).config
    assert TransformerConfig.from_json(config.to_json()) == config
    first = tiny.options["first_k_dense_replace"]
    sparse = [isinstance(layer.feed_forward, MixtureConfig) for layer in config.layers]
    assert sparse == [i >= first for i in range(3)]


@pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3"])
@torch.no_grad()
def test_stacked_experts_load_like_experts_apart(name: str, tmp_path: Path) -> None:
    theirs = DEEPSEEKS[name].save(tmp_path)
    apart = load_checkpoint(tmp_path).model
    stacked = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    ids = DEEPSEEKS[name].ids()
    assert torch.equal(load_checkpoint(tmp_path).model(ids), apart(ids))


def test_a_choice_bias_keeps_its_precision(tmp_path: Path) -> None:
    DEEPSEEKS["deepseek v3"].save(tmp_path / "a")
    exact = load_file(tmp_path / "a" / "model.safetensors")
    half = load_checkpoint(tmp_path / "a", dtype=torch.bfloat16)
    assert half.model.layers[1].feed_forward.router.weight.dtype == torch.bfloat16
    save_checkpoint(half, tmp_path / "b")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")[name], exact[name])


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_beyond_the_file_are_refused_before_they_are_built(
    stacked: bool, tmp_path: Path
) -> None:
    theirs = DEEPSEEKS["deepseek v3"].save(tmp_path)
    if stacked:
        whole = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
        save_file(whole, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_routed_experts": 2**31}))
    with pytest.raises(CheckpointError, match=r"2,?147,?483,?648"):
        load_checkpoint(tmp_path)


@torch.no_grad()
def test_layers_for_drafting_are_left_out(tmp_path: Path) -> None:
    theirs = DEEPSEEKS["deepseek v3"].save(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = "model.layers.3.enorm.weight"
    save_file(load_file(path) | {extra: torch.ones(48)}, path)
    ours = load_checkpoint(tmp_path)
    assert ours.ignored == (extra,)
    ids = DEEPSEEKS["deepseek v3"].ids()
    assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4
    beyond = "model.layers.4.enorm.weight"
    save_file(load_file(path) | {beyond: torch.ones(48)}, path)
    with pytest.raises(CheckpointError, match=r"layers\.4\.enorm\.weight.*no place for"):
        load_checkpoint(tmp_path)


def test_a_missing_or_misshapen_expert_is_named(tmp_path: Path) -> None:
    DEEPSEEKS["deepseek v2"].save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    lost = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({name: tensor for name, tensor in whole.items() if name != lost}, path)
    with pytest.raises(CheckpointError, match=r"layers\.2\.feed_forward\.experts\.5\.up_proj"):
        load_checkpoint(tmp_path)
    rotated = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    save_file(whole | {rotated: whole[rotated][:-1].contiguous()}, path)
    with pytest.raises(CheckpointError, match=r"kv_a_proj_with_mqa.*must have shape \[32, 48\]"):
        load_checkpoint(tmp_path)


def _values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(DEEPSEEKS[name].build().config.to_json_string())
    return values


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("deepseek v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2; supported is 4"),
        ("deepseek v2", {"qk_head_dim": 99}, "qk_head_dim is 99; supported is 24"),
        ("deepseek v2", {"head_dim": 16}, "head_dim is 16; supported is 8"),
        ("deepseek v2", {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number of at least 1"),
        ("deepseek v2", {"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 23}, "rope_head_dim"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek v2", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek v2", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek v2", {"n_group": 3}, "groups must divide num_experts=8: got 3"),
        ("deepseek v2", {"topk_group": 5}, "groups_per_token must be 1 to groups=4: got 5"),
        ("deepseek v2", {"num_experts_per_tok": 9}, "experts_per_token must be 1 to the 4"),
        ("deepseek v2", {"n_routed_experts": None}, "n_routed_experts must be a whole number"),
        ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek v3", {"n_group": 8, "topk_group": 3}, "'best two' needs at least 2 experts"),
        ("deepseek v3", {"mlp_bias": True}, "key 'mlp_bias' .*not understood"),
        ("deepseek v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("deepseek v3", {"indexer_heads": 4}, "key 'indexer_heads' .*not understood"),
        ("deepseek v3", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be"),
    ],
)
def test_contradictions_are_named(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(_values(name) | change, "config.json")


def test_keys_of_the_published_files_are_understood() -> None:
    published = {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "seq_aux": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
    }
    values = _values("deepseek v2")
    wanted = read_config(values, "config.json")
    del values["rope_parameters"], values["head_dim"], values["qk_head_dim"]
    assert read_config(values | published, "config.json") == wanted
