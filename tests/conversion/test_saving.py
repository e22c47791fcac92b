"""Converted models load again; where a Hugging Face family can say them, transformers agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small import small

import polyhead as ph
from polyhead.checkpoints import load_checkpoint
from polyhead.conversion import convert
from polyhead.conversion.draft import Draft
from polyhead.conversion.saving import save
from polyhead.errors import CheckpointError, ConfigError

IDS = torch.arange(3, 33)[None] % 61


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


def _texts() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(61, (100,), generator=drawn) for _ in range(8)]


@pytest.mark.parametrize("target", [{"latent": (16, 16)}, {"num_kv_heads": 1}, {"num_kv_heads": 4}])
def test_uniform_models_are_said_in_words_that_transformers_reads(tmp_path: Path, target):
    import transformers

    new, _ = convert(small("llama"), calibration=_texts(), alone=False, **target)
    assert save(new, tmp_path / "new") == "hugging-face"
    again = load_checkpoint(tmp_path / "new").model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    expected = _logits(new)
    size = float(expected.abs().max())
    torch.testing.assert_close(_logits(again), expected, rtol=0, atol=2e-5 * size)
    with torch.no_grad():
        found = theirs(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * size)
    kind = json.loads((tmp_path / "new" / "config.json").read_text())["model_type"]
    assert kind == ("deepseek_v2" if "latent" in target else "llama")


def test_layers_that_differ_load_again_bit_for_bit(tmp_path: Path):
    new, _ = convert(small("qwen2"), cache=0.5, calibration=_texts(), alone=False)
    assert save(new, tmp_path / "new") == "polyhead"
    again = load_checkpoint(tmp_path / "new").model
    assert again.config == new.config
    assert torch.equal(_logits(again), _logits(new))
    with pytest.raises(ConfigError, match=r"layers differ|bias"):
        save(new, tmp_path / "other", form="hugging-face")
    assert not (tmp_path / "other").exists()


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import polyhead._utils.atomic_write

    new, _ = convert(small("llama"), num_kv_heads=4)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(polyhead._utils.atomic_write, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(new, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_quantized_weights_are_unpacked_for_a_conversion_with_a_warning(tmp_path: Path):
    loaded = ph.load("smollm2")
    with pytest.warns(UserWarning, match=r"unpacked for the conversion: \d+\.\d GiB of float64"):
        draft = Draft.of(loaded)
    name = "layers.0.attention.q_proj"
    weight = loaded.transformer.get_submodule(name).weight
    assert torch.equal(draft.state[f"{name}.weight"], weight.double())
    rebuilt = draft.build(torch.float32)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(rebuilt(ids), loaded(ids), rtol=1e-3, atol=1e-3)
