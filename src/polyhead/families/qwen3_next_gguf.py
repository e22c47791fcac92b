"""GGUF files of Qwen3-Next and Qwen3.5.

The converter adds 1 to all norms but that of DeltaNet's output. In Qwen3-Next it takes the joined
projections apart, in Qwen3.5 it moves value heads; older files of Qwen3-Next have the projections
joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.gguf import EXPERTS, Gguf
from polyhead.families.common.gguf_states import Rates, Tiled, TiledColumns, divided
from polyhead.families.common.mixtures import without_drafts
from polyhead.families.common.steps import AsRow, QKVOfStates
from polyhead.families.common.tensors import Rule

_LINEAR, _OURS = "layers.{i}.linear_attn.", "layers.{i}.attention."
_SETTINGS: Mapping[str, str | None] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": ".inner",
    "full_attention_interval": "full_attention_interval",
}
_OF_EXPERTS: Mapping[str, str | None] = {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size"
}
_OF_IMAGES = [11, 11, 10, 0]  # the converter's where config.json says nothing


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "linear_value_head_dim": divided(values, "linear_num_value_heads", "ssm.time_step_rank"),
        **without_drafts(values, "mtp_num_hidden_layers"),
    }


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    state = next(each for each in found if each.kind == "gated_delta")
    full = next(i for i, each in enumerate(found) if each.kind != "gated_delta")
    return {
        "full_attention_interval": full + 1,
        "ssm.inner_size": state.num_heads * state.head_v_dim,
    }


NEXT = Gguf(
    "qwen3next",
    settings={**_SETTINGS, **_OF_EXPERTS},
    names={_LINEAR + "dt_bias": "blk.{i}.ssm_dt.bias"},
    steps={
        _LINEAR + "A_log": (Rates(),),
        _LINEAR + "conv1d.weight": (),
        _LINEAR + "norm": (),
        "layers.{i}.mlp.shared_expert_gate": (AsRow(),),
    },
    cuts={
        _LINEAR + "in_proj_qkvz": (
            Rule(
                "blk.{i}.attn_qkv",
                [f"{_OURS}{name}_proj" for name in ("q", "k", "v")],
                QKVOfStates(),
            ),
            Rule("blk.{i}.attn_gate", _OURS + "gate_proj"),
        )
    },
    rules=EXPERTS,
    norms=1.0,
    values=_values,
    settings_of=_settings_of,
)

THREE_FIVE = replace(
    NEXT,
    arch="qwen35",
    settings={
        **_SETTINGS,
        "rope.dimension_sections": ".sections",
        "nextn_predict_layers": "mtp_num_hidden_layers",
    },
    cuts={},
    rules=(),
    steps={
        **NEXT.steps,
        _LINEAR + "A_log": (Tiled(), Rates()),
        _LINEAR + "dt_bias": (Tiled(),),
        _LINEAR + "conv1d.weight": (Tiled(behind_keys=True),),
        _LINEAR + "in_proj_qkv": (Tiled(behind_keys=True), QKVOfStates()),
        **{f"{_LINEAR}in_proj_{name}": (Tiled(),) for name in "zba"},
        _LINEAR + "out_proj": (TiledColumns(),),
    },
    settings_of=lambda config: {
        **_settings_of(config),
        "rope.dimension_sections": _OF_IMAGES,
    },
)

THREE_FIVE_MOE = replace(
    THREE_FIVE, arch="qwen35moe", settings={**THREE_FIVE.settings, **_OF_EXPERTS}, rules=EXPERTS
)
