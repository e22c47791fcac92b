"""Released files of the first years: without a prefix, with buffers, older names and keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import all_cases
from safetensors.torch import load_file, save_file

from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.errors import ConfigError
from polyhead.families import read_config
from polyhead.families.common.steps import At
from polyhead.families.deepseek_v4 import ExpertNumbers


def _without_prefix(name: str) -> str:
    return name.removeprefix("transformer.")


def _embed_out(name: str) -> str:
    return name.replace("lm_head.", "embed_out.")


_CASES = {
    "gpt2": (_without_prefix, "h.0.attn.bias", {"n_ctx": 64, "task_specific_params": {}}),
    "gpt_neo": (
        str,
        "transformer.h.0.attn.attention.masked_bias",
        {"gradient_checkpointing": False},
    ),
    "gpt_neox": (_embed_out, "gpt_neox.layers.0.attention.rotary_emb.inv_freq", {}),
    "bloom": (_without_prefix, None, {"n_inner": None, "offset_alibi": 100, "seq_length": 64}),
    "codegen": (str, "transformer.h.0.attn.causal_mask", {"rotary": True}),
    "falcon": (str, None, {"apply_residual_connection_post_layernorm": False}),
}


@pytest.mark.parametrize("model_type", _CASES)
def test_older_files_are_read(model_type: str, tmp_path: Path) -> None:
    rename: Callable[[str], str]
    rename, buffer, keys = _CASES[model_type]
    case = all_cases()[model_type]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    extra = {} if buffer is None else {buffer: torch.ones(1, 1, 4, 4)}
    save_file(tensors | extra, path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    ours = load_checkpoint(tmp_path)
    assert ours.ignored == tuple(extra)
    ids = case.ids()
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert (ours.model(ids) - wanted).abs().max() < 5e-5 * wanted.std()


def test_published_keys_of_inkling_mean_what_transformers_means() -> None:
    values = {**all_cases()["inkling_text"].sizes, "hidden_size": 32, "vocab_size": 61}
    for key in ("layer_types", "mlp_layer_types", "moe_intermediate_size"):
        del values[key]
    values |= {
        "local_layer_ids": [1],
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 40,
        "intermediate_size": 12,
        "sconv_kernel_size": 3,
        "model_max_length": 70,
    }
    made = transformers.AutoConfig.for_model("inkling_text", **values).to_dict()
    ours = read_config(values | {"model_type": "inkling_text"}, "config.json")
    assert ours == read_config(made, "config.json")
    assert [layer.attention.visible_window for layer in ours.layers] == [None, 7, None]
    widths: list[Any] = [layer.feed_forward for layer in ours.layers]
    assert [widths[1].hidden_dim, widths[2].expert.hidden_dim, ours.max_positions] == [40, 12, 70]


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "phi", "falcon", "bloom", "opt", "biogpt"])
def test_bare_body_gives_hidden_states(model_type: str, tmp_path: Path) -> None:
    case = all_cases()[model_type]
    body = case.build().base_model
    body.save_pretrained(tmp_path / "theirs")
    save_checkpoint(load_checkpoint(tmp_path / "theirs"), tmp_path / "ours")
    again = transformers.AutoModel.from_pretrained(
        tmp_path / "ours", attn_implementation=case.attention
    ).eval()
    ids = case.ids()
    with torch.no_grad():
        wanted = body(ids).last_hidden_state
        assert torch.equal(again(ids).last_hidden_state, wanted)
        got = load_checkpoint(tmp_path / "ours").model(ids)
        assert (got - wanted).abs().max() < 5e-5 * wanted.std()


def test_ax_k1_is_read_without_biases_of_the_choice(tmp_path: Path) -> None:
    """Published files have none, and a norm that their dense layers do not use."""
    case = all_cases()["axk1"]
    theirs = case.build()
    for name, tensor in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    bias = "e_score_correction_bias"
    tensors = {name: each for name, each in load_file(path).items() if not name.endswith(bias)}
    unused = "model.layers.0.post_mlp_layernorm.weight"
    save_file({**tensors, unused: torch.ones(32)}, path, metadata={"format": "pt"})
    ours = load_checkpoint(tmp_path / "theirs")
    assert ours.ignored == (unused,)
    save_checkpoint(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = case.ids()
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert (ours.model(ids) - wanted).abs().max() < 5e-5 * wanted.std()
        assert (again(ids).logits - wanted).abs().max() < 5e-5 * wanted.std()


def test_published_keys_of_step_mean_what_transformers_reads() -> None:
    kinds, near = ["full_attention", "sliding_attention"] * 2, "sliding_attention"
    values = {
        "model_type": "step3p5", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "num_attention_heads": 4,
        "num_attention_groups": 2, "head_dim": 12, "max_position_embeddings": 64,
        "layer_types": kinds, "sliding_window": 7, "moe_layers_enum": "1,2", "moe_num_experts": 5,
        "moe_top_k": 2, "moe_intermediate_size": 24, "share_expert_dim": 28,
        "rope_theta": [5e5, 1e4, 5e5, 1e4], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 32.0, "original_max_position_embeddings": 16},
        "yarn_only_types": ["full_attention"], "swiglu_limits": [0.0, 0.0, 7.0, 0.0],
        "attention_other_setting": {"attention_type": near, "num_attention_heads": 6},
        "use_qk_norm": True,
    }  # fmt: skip
    got = read_config(values, "config.json")
    known = transformers.AutoConfig.for_model(**json.loads(json.dumps(values))).to_dict()
    assert got == read_config(known, "config.json")
    assert [layer.attention.num_heads for layer in got.layers] == [4, 6, 4]
    assert got.layers[2].feed_forward.expert.clamp == 7.0
    for key, value in (
        ("swiglu_limits", [0.0] * 2),
        ("swiglu_limits", [-1.0] * 4),
        ("per_layer_config", {"1": {"head_dim": 8}}),
        ("rope_theta", [5e5, 1e4, 1e5, 1e4]),
        ("rope_parameters", {near: {"rope_theta": 1e4}}),
        ("moe_layers_enum", "1,x"),
        ("query_pre_attn_scalar", 0),
    ):
        with pytest.raises(ConfigError, match=f"{key} is "):
            read_config(values | {key: value}, "config.json")


def test_bare_body_that_projects_its_states_is_refused(tmp_path: Path) -> None:
    all_cases()["opt"].build({"word_embed_proj_dim": 20}).base_model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="word_embed_proj_dim is 20; supported is 32 in a bare"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "model_type", ["phi", "persimmon", "stablelm", "gpt_neox", "gpt_neox_japanese", "starcoder2"]
)
def test_absent_rotary_settings_mean_what_transformers_means(
    model_type: str, tmp_path: Path
) -> None:
    case = all_cases()[model_type]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values))
    ids = case.ids()
    with torch.no_grad():
        wanted = theirs(ids).logits
        got = load_checkpoint(tmp_path).model(ids)
        assert (got - wanted).abs().max() < 5e-5 * wanted.std()


def test_hrm_text_counted_the_layers_of_one_stack() -> None:
    """And left the embedding's scale to that of new weights."""
    values = json.loads(all_cases()["hrm_text"].config().to_json_string())
    found = read_config(values, "config.json")
    assert len(found.layers) == values["num_hidden_layers"] == 6 * values["num_layers_per_stack"]
    older = {**values, "num_hidden_layers": values["num_layers_per_stack"]}
    older = {k: v for k, v in older.items() if k not in ("num_layers_per_stack", "embedding_scale")}
    assert read_config(older, "config.json") == found
    with pytest.raises(ConfigError, match="num_hidden_layers is 5; supported is 12"):
        read_config(values | {"num_hidden_layers": 5}, "config.json")
    with pytest.raises(ConfigError, match="H_cycles is 900; supported is so many"):
        read_config(older | {"H_cycles": 900}, "config.json")


def test_ultrabert_listed_windows_and_bases_of_layers() -> None:
    case, listed = all_cases()["ultrabert"], {"attention_windows": [0, 3, 3, None]}
    listed["rope_theta"] = [500.0, 20.0, 20.0, 500.0]
    written = json.loads(case.config(listed).to_json_string())
    first = {key: written[key] for key in written if key not in ("layer_types", "rope_parameters")}
    assert read_config(first | listed, "first") == read_config(written, "later")
    for key, wrong in (
        ("attention_windows", [0, 3, 4, 0]),
        ("attention_windows", [0, 3, 3]),
        ("attention_windows", [0, 3, "3", 0]),
        ("rope_theta", [500.0, 20.0, 21.0, 500.0]),
        ("rope_theta", 500.0),
    ):
        with pytest.raises(ConfigError, match=f"{key} is .*; supported is "):
            read_config(first | listed | {key: wrong}, "first")


def test_deepseek_v4_states_its_layers_by_ratios_and_its_rotation_once() -> None:
    older = {
        "model_type": "deepseek_v4", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 12,
        "o_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0], "rope_theta": 500.0, "compress_rope_theta": 900.0,
        "topk_method": "noaux_tc", "moe_intermediate_size": 20, "max_position_embeddings": 640,
        "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 160, "beta_fast": 32,
            "beta_slow": 1,
        },
    }  # fmt: skip
    found = read_config(older, "config.json")
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(older)))
    assert read_config(json.loads(theirs.to_json_string()), "config.json") == found
    compressed: list[Any] = [layer.attention for layer in found.layers]
    assert [each.block_size for each in compressed] == [None, 4, 128, 4]
    assert [layer.reads_tokens for layer in found.layers] == [True, False, False, False]
    assert [each.rope.type for each in compressed[:2]] == ["default", "yarn"]
    for key, odd in (
        ("compress_ratios", [0, 4, 5, 4]), ("compress_ratios", [0]), ("compress_rates", 3),
        ("expert_dtype", "fp4"), ("n_shared_experts", 2), ("norm_topk_prob", False),
        ("num_key_value_heads", 2), ("partial_rotary_factor", 0.25),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"config.json: .*(qk_rope_head_dim|{key})"):
            read_config(older | {key: odd}, "config.json")


def test_numbers_of_experts_in_a_file_are_those_that_there_are() -> None:
    config = read_config(
        json.loads(all_cases()["deepseek_v4"].config().to_json_string()), "config.json"
    )
    at, step = At(config, "layers.0.feed_forward.table"), ExpertNumbers()
    assert step.changed(torch.tensor([[0, 5]], dtype=torch.int32), at).dtype == torch.int64
    for wrong, words in (([[0, 6]], "got 0 to 6"), ([[-1, 2]], "got -1 to 2"), ([[0.5]], "float")):
        with pytest.raises(ValueError, match=words):
            step.changed(torch.tensor(wrong), at)


def test_dots3_note_states_its_sizes_of_windows_by_keys_of_their_own() -> None:
    written = json.loads(all_cases()["dots3_note_text"].config().to_json_string())
    left_out = "per_layer_config", "rope_parameters", "sliding_window", "layer_types"
    plain = {key: each for key, each in written.items() if key not in left_out}
    swa = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 10}
    swa |= {"kv_lora_rank": 12, "head_dim": 16, "qk_nope_head_dim": 10, "v_head_dim": 8}
    older = plain | {f"swa_{name}": size for name, size in swa.items()}
    older |= {"sliding_window_size": 9, "rope_theta": 500.0, "swa_rope_theta": 100.0}
    windows = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    for changed in (
        older, plain, older | windows, older | windows | {"use_dsa": False},
        older | {"use_sliding_window": False}, older | {"rope_scaling": {"rope_type": "default"}},
    ):  # fmt: skip
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(changed)))
        found = read_config(changed, "config.json")
        assert read_config(json.loads(theirs.to_json_string()), "config.json") == found
    for key, odd in (
        ("per_layer_config", {"1": {"head_dim": 4}, "2": {}}), ("per_layer_config", []),
        ("per_layer_config", {"1": {"vocab_size": 4}, "2": {"vocab_size": 4}}),
        ("use_dsa", 3), ("rope_parameters", {"sliding_attention": 4}), ("mlp_bias", True),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"config.json: .*{key}"):
            read_config(written | {key: odd}, "config.json")


def test_glm5_next_states_its_states_in_an_object() -> None:
    written = json.loads(all_cases()["glm5_next_text"].config().to_json_string())
    for said in (
        {"head_dim": 24, "num_heads": 3, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0},
        {"gate_lower_bound": None}, {"gate_lower_bound": None, "safe_gate": False},
        {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
    ):  # fmt: skip
        older = written | {"linear_attn_config": said}
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(older)))
        del theirs.linear_attn_config
        found = read_config(older, "config.json")
        assert read_config(json.loads(theirs.to_json_string()), "config.json") == found
    for key, odd in (
        ("indexer_types", ["full", "full", "full", "shared"]), ("qk_rope_head_dim", 2),
        ("index_kpool_always_select_tail", False), ("index_kpool", 1), ("linear_lower_bound", 1.0),
        ("linear_attn_config", {"heads": 3}), ("linear_attn_config", 3),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{key}|pool"):
            read_config(written | {key: odd}, "config.json")


@pytest.mark.parametrize("whole", [True, False])
def test_file_of_t5s_encoder_alone_may_be_that_of_the_whole(whole: bool) -> None:
    values = {
        "model_type": "t5",
        "architectures": ["T5EncoderModel"],
        "is_encoder_decoder": whole,
        "d_model": 32,
        "d_ff": 40,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "vocab_size": 61,
    }
    config = read_config(values, "config.json")
    assert (config.kind, len(config.layers), config.head) == ("encoder", 3, None)
    with pytest.raises(ConfigError, match="is_encoder_decoder is False; supported is True"):
        read_config({**values, "architectures": None, "is_encoder_decoder": False}, "config.json")


def test_mistral_4_without_rotary_settings_has_those_of_transformers() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    made = transformers.CONFIG_MAPPING["mistral4"](**sizes, num_hidden_layers=1)
    stated = json.loads(made.to_json_string())
    absent = {key: value for key, value in stated.items() if key != "rope_parameters"}
    assert read_config(absent, "config.json") == read_config(stated, "config.json")
    part = {**stated["rope_parameters"], "partial_rotary_factor": 0.25}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0.25; supported is 0.5, the"):
        read_config({**stated, "rope_parameters": part}, "config.json")


def test_zaya1_states_a_rotary_type_beside_its_kinds() -> None:
    case = all_cases()["zaya"]
    values = json.loads(case.config(case.axes[4][1]).to_json_string()) | {"model_type": "zaya"}
    plain = read_config(values, "config.json")
    ropes = values["rope_parameters"]
    published = values | {"rope_parameters": ropes | {"rope_type": "default"}}
    assert read_config(published, "config.json") == plain
    kinds = [(layer.attention.window, layer.attention.rope.theta) for layer in plain.layers]
    assert kinds == [(None, 5e6), (7, 1e4), (None, 5e6)]
    for key, value in (
        ("rope_parameters", ropes | {"full_attention": {"rope_theta": 1e4}}),
        ("num_experts_per_tok", 2),
        ("sliding_window", None),
        ("layer_types", ["full_attention"] * 3),
    ):
        with pytest.raises(ConfigError, match=rf"config\.json: {key} "):
            read_config(values | {key: value}, "config.json")
    with pytest.raises(ConfigError, match="to see an earlier token: got 1 and 1"):
        read_config(values | {"cca_time0": 1, "cca_time1": 1}, "config.json")
