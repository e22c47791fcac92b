"""LoRA adapters of the PEFT library, merged on load, equal PEFT's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_tiny import DECODERS

from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError, ConfigError

peft = pytest.importorskip("peft")


def _adapted(folder: Path, model: Any, **options: Any) -> Any:
    """A base in ``base``, a random adapter in ``adapter``, and PEFT's model of both."""
    model.save_pretrained(folder / "base")
    torch.manual_seed(3)
    model.name_or_path = str(folder / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **options))
    for name, tensor in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    made.save_pretrained(folder / "adapter")
    return made.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": ["k_proj"], "use_rslora": True},
        {
            "target_modules": "all-linear",
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {"o_proj": 3},
        },
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rank-stabilised", "patterns", "embedding and whole modules"],
)
@torch.no_grad()
def test_merged_adapter_equals_peft(options: dict[str, Any], tmp_path: Path) -> None:
    tiny = DECODERS["llama, GQA"]
    theirs = _adapted(tmp_path, tiny.build(), **options)
    ids = tiny.ids()
    wanted = theirs(ids).logits
    ours = load_checkpoint(tmp_path / "adapter").model(ids)
    assert (ours - wanted).abs().max() < 1e-4
    named = load_checkpoint(tmp_path / "base", adapter=tmp_path / "adapter").model(ids)
    assert torch.equal(named, ours)
    assert (load_checkpoint(tmp_path / "base").model(ids) - wanted).abs().max() > 1e-2


@torch.no_grad()
def test_transposed_weights_take_an_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    theirs = _adapted(tmp_path, model, target_modules=["c_attn"], fan_in_fan_out=True)
    ids = torch.arange(20)[None]
    ours = load_checkpoint(tmp_path / "adapter").model(ids)
    assert (ours - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is 'LORA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"novel": 1}, "key 'novel' .*not understood"),
    ],
)
def test_other_forms_are_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(tmp_path / "adapter")


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _adapted(tmp_path, DECODERS["llama, GQA"].build(), target_modules=["q_proj"])
    DECODERS["llama, MQA"].save(tmp_path / "other")
    narrow = tmp_path / "other"
    values = json.loads((narrow / "config.json").read_text())
    assert values["num_key_value_heads"] == 1
    loaded = load_checkpoint(narrow, adapter=tmp_path / "adapter")
    assert loaded.config.layers[0].attention.num_kv_heads == 1  # q has the same shape here
    DECODERS["llama, explicit head_dim"].save(tmp_path / "wide")
    with pytest.raises(CheckpointError, match="q_proj does not fit"):
        load_checkpoint(tmp_path / "wide", adapter=tmp_path / "adapter")
