"""GGUF files of Nemotron-H and Nemotron 3, whose layers are parts of ours, as in config.json.

What a part is follows from its settings: kv heads, a hidden size, or neither. The least step of a
mixer is in no file; transformers' default is that of the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_states import (
    KV_HEADS,
    MAMBA2,
    attends,
    by_layer,
    kv_heads,
    mamba2_names,
    mamba2_size,
    mamba2_steps,
    mamba2_values,
)
from polyhead.families.common.mixtures import GGUF_MIXTURE, without_drafts
from polyhead.families.common.reading import FULL, LINEAR

DENSE, SPARSE = "mlp", "moe"
_MIXER = "layers.{i}.mixer."
_SETTINGS: Mapping[str, str | None] = {
    **MAMBA2,
    **KV_HEADS,
    "feed_forward_length": ".hidden",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_epsilon": None,
    "rope.freq_base": None,  # nothing is rotated
}
_OF_EXPERTS: Mapping[str, str | None] = {
    **{key: value for key, value in GGUF_MIXTURE.items() if key != "leading_dense_block_count"},
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    count = without_drafts(values)["num_hidden_layers"]
    hidden, blocks = by_layer(values, ".hidden"), []
    for i, (full, size) in enumerate(zip(attends(values), hidden, strict=True)):
        sparse = f"blk.{i}.ffn_gate_inp.weight" in values[".tensors"]
        blocks.append(FULL if full else LINEAR if not size else SPARSE if sparse else DENSE)
    dense = [size for size, kind in zip(hidden, blocks, strict=True) if kind == DENSE]
    return {
        **mamba2_values(values),
        **kv_heads(values),
        **({"intermediate_size": dense[0]} if dense else {}),
        "layers_block_type": blocks[:count],
        "num_hidden_layers": count,
    }


def _settings_of(config: TransformerConfig, *, mixed: bool) -> dict[str, Any]:
    """What the parts are; ``mixed`` says whether networks are mixtures of experts."""
    heads: list[int] = []
    hidden: list[int] = []
    for layer in config.layers:
        attention: Any = layer.attention
        network: Any = layer.feed_forward
        heads.append(attention.num_kv_heads if attention.kind == "heads" else 0)
        hidden.append(0)
        if network is None:
            continue
        if isinstance(network, MixtureConfig) != mixed:
            other = "dense networks" if mixed else "mixtures of experts"
            raise ConfigError(f"this GGUF architecture has no {other}")
        heads.append(0)
        hidden.append(getattr(network, "expert", network).hidden_dim)
    return {
        **mamba2_size(config),
        "block_count": len(heads),
        "attention.head_count_kv": heads,
        "feed_forward_length": hidden,
        "rope.scaling.finetuned": False,
    }


DENSE_GGUF = Gguf(
    "nemotron_h",
    settings=_SETTINGS,
    names=mamba2_names(_MIXER),
    steps=mamba2_steps(_MIXER),
    values=_from_gguf,
    settings_of=lambda config: _settings_of(config, mixed=False),
)
SPARSE_GGUF = replace(
    DENSE_GGUF,
    arch="nemotron_h_moe",
    settings={**_SETTINGS, **_OF_EXPERTS},
    names={
        **DENSE_GGUF.names,
        _MIXER + "gate.e_score_correction_bias": "blk.{i}.exp_probs_b.bias",
        **{
            f"{_MIXER}experts.{{j}}.{name}_proj": f"blk.{{i}}.ffn_{name}_exps"
            for name in ("up", "down")
        },
    },
    settings_of=lambda config: _settings_of(config, mixed=True),
)
