"""nanochat (Karpathy 2025): norms without weights, one of them over the embeddings, relu² networks
without gates, queries and keys normalized after they rotate, capped logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from polyhead.config import EmbeddingConfig, NormConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.steps import At, OneToOne
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION
from polyhead.families.common.tensors import Rule, Tensors, under


@dataclass(frozen=True)
class TurnedBack(OneToOne):
    """Heads rotate the other way round, as they would with the halves of their rows swapped."""

    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        size = at.attention.head_dim
        if tensor.shape[0] % size:
            return tensor  # misshapen: reported by its name when the state is checked
        rows = tensor.reshape(-1, size, *tensor.shape[1:])
        return rows.roll(size // 2, dims=1).reshape(tensor.shape)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return self.changed(tensor, at)


def read(keys: Keys) -> TransformerConfig:
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight=False)
    plain = Plain(keys, norm=norm, network=read_network(keys, gated=False))
    layer = plain.layer(plain.attention(qk_norm=QKNormConfig(norm, place="after_rope")))
    config = plain.decoder([layer], logit_softcap=keys.number("final_logit_softcapping", None))
    return replace(config, embedding=EmbeddingConfig(norm=norm))


def write(config: TransformerConfig) -> dict[str, Any]:
    return {"final_logit_softcapping": config.logit_softcap}


_THEIRS, _OURS = "layers.{i}.self_attn.", "layers.{i}.attention."

FAMILIES = (
    Family(
        "nanochat",
        "NanoChat",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *(
                    Rule(_THEIRS + name, _OURS + name, TurnedBack())
                    for name in ("q_proj", "k_proj")
                ),
                *ATTENTION,
                *under(
                    "layers.{i}.mlp.",
                    "layers.{i}.feed_forward.",
                    {"fc1": "up_proj", "fc2": "down_proj"},
                ),
            )
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "hidden_act": "relu2",
            "final_logit_softcapping": 15.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        write=write,
    ),
)
