"""Tiny random models of every family equal transformers' eager float32, through the converter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from hf_tiny import BERTS, DECODERS, Tiny
from safetensors.torch import load_file, save_file

from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError
from polyhead.semantics import KeyLengths


@pytest.mark.parametrize("tiny", DECODERS.values(), ids=DECODERS.keys())
def test_decoder_logits_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path)
    ours = load_checkpoint(tmp_path)
    ids = tiny.ids()
    with torch.no_grad():
        wanted, got = theirs(ids).logits, ours.model(ids)
    assert (got - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1, "the models' outputs are too small to tell them apart"


@pytest.mark.parametrize("name", ["llama, GQA", "mistral, window", "qwen3, late windows"])
def test_decoding_through_the_cache_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = DECODERS[name].save(tmp_path)
    ours = load_checkpoint(tmp_path)
    ids = DECODERS[name].ids()
    with torch.no_grad():
        wanted = theirs(ids).logits
        cache = ours.model.new_cache()
        chunks = ids[:, :30].split([17] + [1] * 13, dim=1) + ids[:, 30:].split(10, dim=1)
        steps = [ours.model(chunk, cache=cache) for chunk in chunks]
    assert (torch.cat(steps, dim=1) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "trained"), [("llama, dynamic rope", 64), ("llama, longrope, long", 32)]
)
@pytest.mark.parametrize("chunk", [1, 13])
def test_past_the_trained_length_a_cache_equals_transformers_cache_and_not_one_pass(
    name: str, trained: int, chunk: int, tmp_path: Path
) -> None:
    theirs = DECODERS[name].save(tmp_path)
    ours = load_checkpoint(tmp_path).model
    ids = DECODERS[name].ids()[:, : trained + 20]
    cache, past, steps, wanted = ours.new_cache(), None, [], []
    with torch.no_grad():
        for piece in (ids[:, : trained - 6], *ids[:, trained - 6 :].split(chunk, dim=1)):
            made = theirs(piece, past_key_values=past)
            past = made.past_key_values
            wanted.append(made.logits)
            steps.append(ours(piece, cache=cache))
        got, one_pass = torch.cat(steps, dim=1), ours(ids)
        assert (one_pass - theirs(ids).logits).abs().max() < 1e-4
    assert (got - torch.cat(wanted, dim=1)).abs().max() < 1e-4
    # What stands in the cache was rotated before the switch.
    assert (got - one_pass)[:, trained:].abs().max() > 0.01


@pytest.mark.parametrize(
    "name", ["llama, llama3 rope", "llama, yarn rope", "llama, longrope, long"]
)
def test_the_older_spelling_of_rope_means_the_same(name: str, tmp_path: Path) -> None:
    theirs = DECODERS[name].save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_scaling"] = config.pop("rope_parameters")
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    path.write_text(json.dumps(config))
    ids = DECODERS[name].ids()
    with torch.no_grad():
        assert (load_checkpoint(tmp_path).model(ids) - theirs(ids).logits).abs().max() < 1e-4


def test_late_windows_follow_from_max_window_layers(tmp_path: Path) -> None:
    name = "qwen3, late windows"
    theirs = DECODERS[name].save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("layer_types") == ["full_attention"] + ["sliding_attention"] * 2
    path.write_text(json.dumps(config))
    ids = DECODERS[name].ids()
    with torch.no_grad():
        assert (load_checkpoint(tmp_path).model(ids) - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("tiny", BERTS.values(), ids=BERTS.keys())
def test_encoder_states_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path)
    ours = load_checkpoint(tmp_path)
    ids = tiny.ids(batch=3)
    lengths = torch.tensor([tiny.tokens, 11, 1])
    keep = torch.arange(tiny.tokens) < lengths[:, None]
    segments = torch.zeros_like(ids)
    if theirs.config.type_vocab_size > 1:
        segments[:, 5:] = 1
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=keep.long(), token_type_ids=segments)
        got = ours.model(ids, segments=segments, mask=KeyLengths(lengths))
    assert (got - wanted.last_hidden_state)[keep].abs().max() < 1e-4
    assert "pooler.dense.weight" in ours.ignored


def test_bare_body_gives_hidden_states(tmp_path: Path) -> None:
    theirs = DECODERS["llama, GQA"].build().model
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    ids = DECODERS["llama, GQA"].ids()
    with torch.no_grad():
        assert (ours.model(ids) - theirs(ids).last_hidden_state).abs().max() < 1e-4


def test_older_names_of_norm_parameters_and_buffers_are_known(tmp_path: Path) -> None:
    theirs = BERTS["bert"].save(tmp_path / "bert")
    path = tmp_path / "bert" / "model.safetensors"
    leaves = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, old in leaves.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    renamed["embeddings.position_ids"] = torch.arange(64)[None]
    save_file(renamed, path)
    ids = BERTS["bert"].ids()
    with torch.no_grad():
        wanted = theirs(ids).last_hidden_state
        assert (load_checkpoint(tmp_path / "bert").model(ids) - wanted).abs().max() < 1e-4

    DECODERS["llama, GQA"].save(tmp_path / "llama")
    path = tmp_path / "llama" / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | buffer, path)
    assert load_checkpoint(tmp_path / "llama").ignored == tuple(buffer)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    theirs = DECODERS["llama, GQA"].build()
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = DECODERS["llama, GQA"].ids()
    with torch.no_grad():
        assert (load_checkpoint(tmp_path).model(ids) - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_in_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    DECODERS["qwen2"].build().to(dtype).save_pretrained(tmp_path)
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = DECODERS["qwen2"].ids()
    ours = load_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in ours.model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4
    kept = load_checkpoint(tmp_path, dtype=dtype)
    assert {tensor.dtype for tensor in kept.model.parameters()} == {dtype}


def test_dtype_auto_is_that_of_the_file(tmp_path: Path) -> None:
    DECODERS["qwen2"].build().to(torch.bfloat16).save_pretrained(tmp_path)
    kept = load_checkpoint(tmp_path, dtype="auto")
    assert {tensor.dtype for tensor in kept.model.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_half_precision_is_loaded_without_a_wider_copy(tmp_path: Path) -> None:
    """The tensors are the file's own memory where the dtype is the file's."""
    DECODERS["qwen2"].build().to(torch.float16).save_pretrained(tmp_path)
    kept = load_checkpoint(tmp_path, dtype=torch.float16)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        [int(end, 16) for end in line[0].split("-")]
        for line in maps
        if line[-1].startswith(str(tmp_path))
    ]
    for name, tensor in kept.model.named_parameters():
        at = tensor.data_ptr()
        assert any(low <= at < high for low, high in mapped), f"{name} was copied"


def test_a_device_that_is_not_here_is_named(tmp_path: Path) -> None:
    DECODERS["qwen2"].save(tmp_path)
    with pytest.raises(ValueError, match="device 'cuda:99' is unavailable"):
        load_checkpoint(tmp_path, device="cuda:99")
    with pytest.raises(ValueError, match="device 'nonsense' is unavailable"):
        load_checkpoint(tmp_path, device="nonsense")


@pytest.mark.parametrize("shards", [1, 2])
def test_pickles_come_with_the_command_that_converts_them(shards: int, tmp_path: Path) -> None:
    theirs = DECODERS["llama, tied"].save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = list(theirs.state_dict().items())
    for number in range(shards):
        torch.save(dict(state[number::shards]), tmp_path / f"pytorch_model-{number}.bin")
    with pytest.raises(CheckpointError, match="only as a pickle") as caught:
        load_checkpoint(tmp_path)
    command = str(caught.value).partition("runs none: ")[2]
    subprocess.run(command, shell=True, check=True, timeout=120)
    ids = DECODERS["llama, tied"].ids()
    with torch.no_grad():
        assert (load_checkpoint(tmp_path).model(ids) - theirs(ids).logits).abs().max() < 1e-4
