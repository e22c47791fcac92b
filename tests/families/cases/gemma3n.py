from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gguf_files import GgufCase
from harness import TIED, Case
from torch import Tensor

from cases.gemma4 import layers

_KINDS = ["sliding_attention", "full_attention"]
_SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}


def _settings(config: Any) -> Mapping[str, Any]:
    normal = torch.distributions.Normal(0, 1)
    sparsities = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    return {
        **layers(config),
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": normal.icdf(sparsities).tolist(),
    }


def _changed(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    yield name + (".weight" if name.endswith("_scale") else ""), tensor


CASES = (
    Case(
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": 2 * _KINDS,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 61,
            "laurel_rank": 6,
            "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.9],
        },
        axes=(
            TIED,
            (
                {},
                {"num_kv_shared_layers": 0},
                {"layer_types": [_KINDS[1], _KINDS[0], _KINDS[1], _KINDS[1]]},
                {"activation_sparsity_pattern": None},
            ),
            (
                {},
                {"altup_num_inputs": 3, "altup_active_idx": 1},
                {"altup_num_inputs": 2, "altup_correct_scale": False},
            ),
            (
                {},
                {"attention_bias": True},
                {"final_logit_softcapping": 2.0},
                {"intermediate_size": [40, 24, 48, 40]},
                # Ids beyond the table read its first row, which is not padding here.
                {"vocab_size_per_layer_input": 50, "pad_token_id": 1},
            ),
            ({}, _SCALED),
        ),
        spread=0.1,
        gguf=GgufCase("gemma3n", _settings, _changed),
        more_gguf=(
            GgufCase(
                "gemma3n",
                _settings,
                _changed,
                {"num_kv_shared_layers": 0, "intermediate_size": [40, 24, 48, 40]},
            ),
        ),
    ),
)
