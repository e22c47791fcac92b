"""Text models of Qwen2-VL to Qwen3-Omni, GLM-4.1V and 4.5V, PaddleOCR-VL, and Emu3 (2024 to 2025).

All but Emu3 rotate by three coordinates (M-RoPE; Qwen2-VL, Wang et al. 2024, §2.1), which are equal
in text; where a file states their sections, calls may give coordinates. So each is a family that
has ordinary rotary embedding, with other defaults, and is saved as that: transformers has no class
of theirs with a head and without an image encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS as GGUF_EXPERTS
from polyhead.families.common.mixtures import STACKED_EXPERTS
from polyhead.families.common.steps import At, OneToOne, PerExpert, Rows
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule
from polyhead.families.ernie4_5 import FAMILIES as ERNIE
from polyhead.families.glm import FAMILIES as GLM
from polyhead.families.glm4_moe import FAMILIES as GLM_MOE
from polyhead.families.llama import FAMILIES as LLAMA
from polyhead.families.qwen import FAMILIES as QWEN
from polyhead.families.qwen_moe import FAMILIES as QWEN_MOE

_TEXTS = {each.model_type: each for each in (*QWEN, *QWEN_MOE, *GLM, *GLM_MOE, *ERNIE, *LLAMA)}
_QWEN2, _QWEN3, _QWEN3_MOE = (_TEXTS[name] for name in ("qwen2", "qwen3", "qwen3_moe"))
_GLM4, _GLM4_MOE, _ERNIE = (_TEXTS[name] for name in ("glm4", "glm4_moe", "ernie4_5"))
_LLAMA = _TEXTS["llama"]


@dataclass(frozen=True)
class Upright(OneToOne):
    """An expert's ``[in, out]`` as ``[out, in]``; what has that shape already stays, as in
    transformers, which has written both.

    Attributes:
        down: Of the projection back.
    """

    down: bool = False

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        mixture: Any = at.layer.feed_forward
        hidden, width = mixture.expert.hidden_dim, at.config.embed_dim
        shape = (width, hidden) if self.down else (2 * hidden, width)
        return tensor if tensor.ndim != 2 or tuple(tensor.shape) == shape else tensor.mT

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor


def _text(
    family: Family,
    model_type: str,
    defaults: Mapping[str, Any],
    arch: str | None = None,
    interleaved: bool = False,
    **rotary: Any,
) -> Family:
    """A family under another type, with defaults of its own; ``arch`` is that of GGUF files, and
    ``interleaved`` says how its code takes the sections of coordinates."""
    reader: Any = family.read
    gguf = None
    if arch is not None and family.gguf is not None:
        settings = {**family.gguf.settings, **_OF_IMAGES}
        gguf = replace(family.gguf, arch=arch, settings=settings, rules=GGUF_EXPERTS)
    return replace(
        family,
        model_type=model_type,
        read=partial(reader, interleaved_sections=interleaved, **rotary),
        defaults={**family.defaults, **defaults},
        written_as=family.model_type,
        gguf=gguf,
        predictor=None,
    )


_OF_IMAGES = {"rope.dimension_sections": ".sections", "n_deepstack_layers": None}
_VL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
_GATE_UP, _DOWN = STACKED_EXPERTS
_UPRIGHT = DECODER.extended(
    Rule("layers.{i}.mlp.gate", "layers.{i}.feed_forward.router"),
    Rule(_GATE_UP.theirs, _GATE_UP.ours, PerExpert(), Upright(), Rows()),
    Rule(_DOWN.theirs, _DOWN.ours, PerExpert(), Upright(down=True)),
)

TEXTS = (
    _text(_QWEN2, "qwen2_vl_text", _VL, "qwen2vl", theta=1e6),
    _text(_QWEN2, "qwen2_5_vl_text", _VL, theta=1e6),
    _text(
        _QWEN2,
        "qwen2_5_omni_text",
        {"num_key_value_heads": 4, "sliding_window": 32_768, "tie_word_embeddings": True},
        theta=1e6,
    ),
    _text(_QWEN3, "qwen3_vl_text", {}, "qwen3vl", True, theta=5e5),
    replace(
        _text(
            _QWEN3_MOE,
            "qwen3_vl_moe_text",
            {
                "num_key_value_heads": 16,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "norm_topk_prob": True,
                "tie_word_embeddings": True,
            },
            "qwen3vlmoe",
            True,
            theta=5e5,
        ),
        tensors=_UPRIGHT,
    ),
    _text(
        _QWEN3_MOE,
        "qwen3_omni_moe_text",
        {"norm_topk_prob": True, "sliding_window": None},
        interleaved=True,
        theta=1e6,
    ),
    _text(
        _GLM4,
        "glm4v_text",
        {"head_dim": None, "rms_norm_eps": 1e-5, "pad_token_id": None},
        part=1.0,
    ),
    _text(_GLM4_MOE, "glm4v_moe_text", {"attention_bias": True}),
    _text(
        _LLAMA,
        "emu3_text_model",
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.1,
            "bos_token_id": 151_849,
            "eos_token_id": 151_850,
            "pad_token_id": 151_643,
        },
        theta=1e6,
    ),
    replace(_text(_ERNIE, "paddleocr_vl_text", {}, "paddleocr"), tensors=DECODER),
)
