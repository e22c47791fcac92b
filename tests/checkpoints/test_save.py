"""Saved models are the same for polyhead and for transformers, and are never half there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hf_tiny import BERTS, DECODERS, DEEPSEEKS, GEMMAS
from safetensors.torch import load_file

from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.errors import CheckpointError, ConfigError

# One of each form that a file can have; tests/families saves every family with every option.
SAVED = (
    "llama, GQA",
    "llama, tied",
    "llama, longrope, long",
    "qwen2, some windows",
    "deepseek v2, no q latent",
    "deepseek v3",
    "gemma3, scaled global rope",
    "bert",
)


@torch.no_grad()
@pytest.mark.parametrize("name", SAVED)
def test_saved_model_is_the_same_here_and_in_transformers(name: str, tmp_path: Path) -> None:
    tiny = (DECODERS | DEEPSEEKS | GEMMAS | BERTS)[name]
    tiny.save(tmp_path / "theirs")
    loaded = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(loaded, tmp_path / "ours")

    again = load_checkpoint(tmp_path / "ours")
    ids = tiny.ids()
    assert again.config == loaded.config
    assert torch.equal(again.model(ids), loaded.model(ids))

    auto = transformers.AutoModel if name in BERTS else transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert all("pooler" in key for key in report["missing_keys"])
    out = theirs.eval()(ids)
    wanted = out.last_hidden_state if name in BERTS else out.logits
    assert (again.model(ids) - wanted).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", SAVED)
def test_own_form_holds_every_tensor_as_it_is(name: str, tmp_path: Path) -> None:
    tiny = (DECODERS | DEEPSEEKS | GEMMAS | BERTS)[name]
    tiny.save(tmp_path / "theirs")
    loaded = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(loaded, tmp_path / "ours", form="polyhead")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    again = load_checkpoint(tmp_path / "ours")
    assert again.config == loaded.config
    state = loaded.model.state_dict()
    assert set(written) == set(state)
    assert all(torch.equal(written[key], tensor) for key, tensor in state.items())
    assert torch.equal(again.model(tiny.ids()), loaded.model(tiny.ids()))


@pytest.mark.model
@torch.no_grad()
def test_smollm2_saved_from_gguf_is_read_by_transformers(
    smollm2: Checkpoint, tmp_path: Path
) -> None:
    save_checkpoint(smollm2, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.config == smollm2.config
    for (name, got), wanted in zip(
        again.model.state_dict().items(), smollm2.model.state_dict().values(), strict=True
    ):
        assert torch.equal(got, wanted), name
    text = "Two households, both alike in dignity, 12 <|im_end|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert again.tokenizer.encode(text) == ids == smollm2.tokenizer.encode(text)
    assert again.tokenizer.stop_ids == smollm2.tokenizer.stop_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    difference = again.model(torch.tensor([ids])) - theirs(torch.tensor([ids])).logits
    assert difference.abs().max() < 2e-4


def test_half_precision_stays_half(tmp_path: Path) -> None:
    DECODERS["llama, GQA"].save(tmp_path / "a")
    half = load_checkpoint(tmp_path / "a", dtype=torch.bfloat16)
    save_checkpoint(half, tmp_path / "b")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert theirs.dtype == torch.bfloat16


def test_a_model_may_be_saved_over_itself(tmp_path: Path) -> None:
    DECODERS["llama, GQA"].save(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "chat_template.jinja").write_text("of the model before")
    loaded = load_checkpoint(tmp_path)
    with torch.no_grad():
        for tensor in loaded.model.parameters():
            tensor.mul_(2)
    save_checkpoint(loaded, tmp_path)
    again = load_checkpoint(tmp_path)
    assert torch.equal(again.model.final_norm.weight, loaded.model.final_norm.weight)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not (tmp_path / "chat_template.jinja").exists()
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not list(tmp_path.glob(".partial*"))


def test_changing_a_loaded_model_leaves_its_file_alone(tmp_path: Path) -> None:
    DECODERS["llama, GQA"].save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    loaded = load_checkpoint(tmp_path)
    with torch.no_grad():
        for tensor in loaded.model.parameters():
            tensor.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_nothing_is_left_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DECODERS["llama, GQA"].save(tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyhead.checkpoints.save.write_json", full)
    with pytest.raises(CheckpointError, match=r"b cannot be written: No space left on device"):
        save_checkpoint(loaded, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointError):
        save_checkpoint(loaded, tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    DECODERS["llama, GQA"].save(tmp_path / "a")
    (tmp_path / "b").write_text("a file")
    with pytest.raises(CheckpointError, match="b cannot be written"):
        save_checkpoint(load_checkpoint(tmp_path / "a"), tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_configuration_that_no_family_has_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from polyhead.models.transformer import Transformer

    DECODERS["llama, GQA"].save(tmp_path / "a")
    config = replace(load_checkpoint(tmp_path / "a").config, logit_softcap=30.0)
    odd = Checkpoint(config, Transformer(config), None, "here")
    with pytest.raises(ConfigError, match=r"logit_softcap=30\.0"):
        save_checkpoint(odd, tmp_path / "b")
    assert not (tmp_path / "b").exists()
