"""T5Gemma 2's files: what stands beside its text models, and both spellings of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import all_cases
from safetensors.torch import load_file, save_file
from transformers.models.t5gemma2.modeling_t5gemma2 import sliding_window_mask_function

from polyhead.checkpoints import load_checkpoint
from polyhead.families import read_config

CASE = all_cases()["t5gemma2"]


def test_the_vision_tower_is_left_out_by_name(tmp_path: Path) -> None:
    """transformers' own class runs without it, where it is given no picture."""
    CASE.build().save_pretrained(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found.left_out == ("encoder.vision_tower", "encoder.multi_modal_projector")
    written = load_file(tmp_path / "model.safetensors")
    assert {*found.ignored} == {name for name in written if "vision" in name or "_modal_" in name}


@pytest.mark.parametrize("window", range(1, 8))
def test_windows_of_the_encoder_are_those_of_transformers(window: int) -> None:
    values = CASE.config().to_dict()
    values["encoder"]["text_config"]["sliding_window"] = window
    found: Any = read_config(values, "config.json").encoder_layers[0].attention
    seen = sliding_window_mask_function(window, is_causal=False)
    for distance in range(-8, 9):
        ours = -found.window_ahead <= distance < found.window
        assert ours == seen(0, 0, 20 + distance, 20)


def test_names_with_the_module_of_the_text_model_are_read_too(tmp_path: Path) -> None:
    CASE.build().save_pretrained(tmp_path)
    wanted = load_checkpoint(tmp_path).model.state_dict()
    path = tmp_path / "model.safetensors"
    tensors = {
        name
        if "vision" in name or "_modal_" in name
        else name.replace(".encoder.", ".encoder.text_model."): tensor
        for name, tensor in load_file(path).items()
    }
    assert any("encoder.text_model.layers" in name for name in tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    found = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
