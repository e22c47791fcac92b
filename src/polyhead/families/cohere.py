"""Command R (Cohere 2024) and Command R7B: parallel layers with one LayerNorm, scaled logits; the
second has windows with rotation in three of four layers and neither in the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed, write_window
from polyhead.families.common.reading import read_layer_norm
from polyhead.families.common.steps import At, RotaryPairs
from polyhead.families.common.tables import AROUND_LAYERS, NETWORK
from polyhead.families.common.tensors import Rule, Tensors, under

_DEFAULTS = {key: value for key, value in PLAIN_DEFAULTS.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "pad_token_id": 0,
}


def read_first(keys: Keys) -> TransformerConfig:
    norm = read_layer_norm(keys, bias=False)
    plain = Plain(keys, norm=norm, theta=5e5)
    qk_norm = QKNormConfig(norm, per_head=True) if keys.flag("use_qk_norm") else None
    layer = plain.layer(plain.attention(qk_norm=qk_norm), parallel="one norm")
    return plain.decoder([layer], logit_scale=keys.number("logit_scale"))


def read_second(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, norm=read_layer_norm(keys, bias=False))
    count, pattern = plain.sizes.num_layers, keys.whole("sliding_window_pattern", 4)
    keys.take("_sliding_window_pattern", None)  # follows from layer_types
    attentions = windowed(keys, plain.attention(), count, every(count, max(pattern, 1)), rope=None)
    layers = [plain.layer(each, parallel="one norm") for each in attentions]
    return plain.decoder(layers, logit_scale=keys.number("logit_scale"))


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"logit_scale": config.logit_scale, "use_qk_norm": attention.qk_norm is not None}


def write_second(config: TransformerConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, **write_window(config, 4096)}


@dataclass(frozen=True)
class WeightPairs(RotaryPairs):
    """``RotaryPairs`` of norms with a weight for each head, ``[H, D]``."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return super().changed(tensor.flatten(), at).view_as(tensor)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return super().restored(tensor.flatten(), at).view_as(tensor)


def _tensors() -> Tensors:
    theirs, ours = "layers.{i}.self_attn.", "layers.{i}.attention."
    return Tensors(
        (
            *AROUND_LAYERS,
            Rule("layers.{i}.input_layernorm", "layers.{i}.attention_norm"),
            *(Rule(theirs + name, ours + name, RotaryPairs()) for name in ("q_proj", "k_proj")),
            *(Rule(theirs + name, ours + name, WeightPairs()) for name in ("q_norm", "k_norm")),
            *under(theirs, ours, {"v_proj": "v_proj", "o_proj": "o_proj"}),
            *NETWORK,
        )
    )


FAMILIES = (
    Family(
        "cohere",
        "Cohere",
        read_first,
        _tensors(),
        defaults=_DEFAULTS | {"use_qk_norm": False},
        write=write,
        gguf=Gguf("command-r"),
    ),
    Family(
        "cohere2",
        "Cohere2",
        read_second,
        _tensors(),
        defaults=_DEFAULTS | {"sliding_window": 4096},
        write=write_second,
        gguf=Gguf("cohere2"),
    ),
)
