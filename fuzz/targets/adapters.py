"""LoRA adapters: their configuration and their tensors, merged into a base or kept beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from fuzz import mutation
from fuzz.targets import config_json
from fuzz.targets.saved_caches import cut, overwrite
from polyhead.checkpoints import attach_adapter, load_checkpoint

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "down_proj"],
    "alpha_pattern": {"down_proj": 2},
    "rank_pattern": {"down_proj": 2},
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "modules_to_save": None,
}
LAYER = "base_model.model.model.layers.0."
TENSORS = {
    f"{LAYER}self_attn.q_proj.lora_A.weight": torch.ones(4, 32),
    f"{LAYER}self_attn.q_proj.lora_B.weight": torch.ones(32, 4),
    f"{LAYER}mlp.down_proj.lora_A.weight": torch.ones(2, 64),
    f"{LAYER}mlp.down_proj.lora_B.weight": torch.ones(32, 2),
}
WEIGHTS = "adapter_model.safetensors"
adapter = Path()


def prepare() -> None:
    global adapter
    config_json.prepare()
    adapter = Path(tempfile.mkdtemp())


def case(random: Random) -> None:
    base = config_json.directory / "0"
    kind, config = random.random(), CONFIG | {"base_model_name_or_path": str(base)}
    text = mutation.json_text(random, config) if kind < 0.6 else json.dumps(config).encode()
    (adapter / "adapter_config.json").write_bytes(text)
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    for _ in range(random.choice((1, 1, 2)) if kind > 0.55 else 0):
        if kind > 0.85 or not tensors:
            overwrite(random, tensors)
        elif random.random() < 0.3:
            name = random.choice(sorted(tensors))
            tensors[mutation.text(random, name, (".", "layers.9", "lora_A"))] = tensors.pop(name)
        else:
            cut(random, tensors)
    save_file(tensors, adapter / WEIGHTS)
    ids = torch.tensor([[0, 3, 5]])
    with torch.no_grad():
        merged = random.random() < 0.6
        model = load_checkpoint(base, adapter=adapter if merged else None).model
        if not merged:
            attach_adapter(model, adapter)
        assert model(ids).shape[:2] == ids.shape
