"""Every type of transformers' language models loads, or is refused by a reason: none is unknown."""

from __future__ import annotations

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from polyhead.errors import ConfigError
from polyhead.families import REFUSED, families, find_family

TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
)
PENDING = frozenset((
    # Decoders.
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "bitnet", "cohere2_moe",
    "cohere_compass_text", "cpmant", "cwm", "doge", "dots1", "ernie4_5_moe", "exaone_moe",
    "falcon_h1", "flex_olmo", "flint", "gemma4_text", "gemma4_unified_text", "gpt-sw3",
    "granite_swa", "granitemoe_swa", "hrm_text", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "lfm3",
    "longcat_flash", "mellum", "mimo_v2_flash", "minimax_m3_vl_text", "ministral3", "nanochat",
    "nemotron_h", "solar_open", "vaultgemma", "zamba", "zamba2", "zaya",
    # Encoders, some of them with a causal class.
    "bert-generation", "data2vec-text", "ernie", "esm", "megatron-bert",
    "modernbert-decoder", "rembert", "roberta-prelayernorm", "roc_bert", "xlm-roberta-xl",
    "xmod",
    # Wrappers around a text model.
    "audioflamingo3", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git",
    "glmasr", "got_ocr2", "granite_speech", "granite_speech_plus", "llama4", "mllama",
    "moss_transcribe_diarize", "musicflamingo", "nemo_speechlm", "phi4_multimodal",
    "qwen2_audio", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "vibevoice_asr", "voxtral",
    "voxtral_realtime",
))  # fmt: skip
"""Neither read nor refused yet. It only ever shrinks."""
GONE = {"transfo-xl"}
"""Refused types that transformers had once."""


@pytest.mark.parametrize("name", TYPES)
def test_no_type_is_unknown(name: str) -> None:
    assert name in families() or name in REFUSED or name in PENDING


def test_pending_types_are_neither_read_nor_refused() -> None:
    assert not PENDING - {*TYPES}
    assert not PENDING & {*families(), *REFUSED}


def test_no_type_is_both_read_and_refused() -> None:
    assert not families().keys() & REFUSED.keys()


def test_refused_types_are_those_of_transformers() -> None:
    assert REFUSED.keys() - CONFIG_MAPPING_NAMES.keys() == GONE


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_is_one_clause_and_is_told(name: str) -> None:
    reason = REFUSED[name]
    assert 20 < len(reason) <= 90
    assert "\n" not in reason
    assert not reason.endswith(".")
    with pytest.raises(ConfigError) as error:
        find_family(name, "config.json")
    assert str(error.value).endswith(reason)
