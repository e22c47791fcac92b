"""M2M-100 and NLLB (Fan et al. 2021; NLLB Team 2022): sinusoids from the second position on."""

from __future__ import annotations

from polyhead.config import EmbeddingConfig, SinusoidConfig, TransformerConfig
from polyhead.families import bart
from polyhead.families.common.keys import Keys
from polyhead.families.opt import OFFSET


def read(keys: Keys) -> TransformerConfig:
    # Positions are counted from the id of padding on, whose own row is zero.
    keys.expect("pad_token_id", OFFSET - 1)
    embedding = EmbeddingConfig(
        "sinusoidal", position_offset=OFFSET, sinusoid=SinusoidConfig("halves", spread=True)
    )
    return bart.read(keys, embedding, first=True, head_bias=False)


FAMILIES = (
    bart.sister(
        "m2m_100",
        "M2M100",
        read,
        sinusoids=True,
        defaults={"hidden_act": "relu", "attention_dropout": 0.1, "scale_embedding": True},
    ),
)
