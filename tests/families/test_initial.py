"""New weights have the standard deviations that transformers' classes give them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

from polyhead.config import InitialConfig
from polyhead.errors import ConfigError
from polyhead.families import find_family, read_config, write_config
from polyhead.models import Transformer

_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
          "intermediate_size": 192, "max_position_embeddings": 64, **_IDS}  # fmt: skip
_BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192,
         "vocab_size": 300, "max_position_embeddings": 64, "decoder_start_token_id": 2,
         **_IDS}  # fmt: skip
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 3, "num_heads": 4, "vocab_size": 300,
       "decoder_start_token_id": 2, "tie_word_embeddings": False, **_IDS}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "initializer_range": 0.05, "num_key_value_heads": 2},
    "starcoder2": {**_SIZES, "num_key_value_heads": 2},
    "bert": {**_SIZES, "initializer_range": 0.01},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 64,
             "initializer_range": 0.04, **_IDS},
    "opt": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 192,
            "vocab_size": 300, "max_position_embeddings": 64, "word_embed_proj_dim": 64,
            "init_std": 0.03, **_IDS},
    "bart": {**_BART, "init_std": 0.07},
    "marian": {**_BART, "decoder_vocab_size": 300},
    "t5": {**_T5, "initializer_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_standard_deviations_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    theirs_config = hf.CONFIG_MAPPING[name](**KINDS[name])
    kinds = hf.MODEL_FOR_MASKED_LM_MAPPING if name == "bert" else hf.MODEL_FOR_CAUSAL_LM_MAPPING
    if theirs_config.is_encoder_decoder:
        kinds = hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    theirs = kinds[type(theirs_config)](theirs_config)
    values = {**theirs_config.to_dict(), "model_type": name}
    config = read_config(values, "config.json")
    table = find_family(name, "config.json").tensors_of(values)
    made = table.to_theirs(Transformer(config).state_dict(), config)
    compared = 0
    for key, ours in made.items():
        other = theirs.state_dict().get(key)
        if other is None or ours.numel() < 100:
            continue
        assert other.shape == ours.shape
        wanted, found = float(other.std()), float(ours.std())
        assert found == pytest.approx(wanted, rel=0.15, abs=1e-4), key
        compared += 1
    assert compared > 10


def test_the_scale_is_read_written_and_makes_no_other_model() -> None:
    values = {"model_type": "llama", **KINDS["llama"]}
    config = read_config(values, "config.json")
    assert config.initial == InitialConfig("normal", 0.05)
    assert write_config(config)["initializer_range"] == 0.05
    usual = read_config({**values, "initializer_range": None}, "config.json")
    assert usual.initial.scale == 0.02
    assert "initializer_range" not in write_config(usual)
    assert usual == config
    assert (
        write_config(read_config({"model_type": "t5", **KINDS["t5"]}, "x"))["initializer_factor"]
        == 0.5
    )
    with pytest.raises(ConfigError, match=r"config\.json: initializer_range must be"):
        read_config({**values, "initializer_range": "much"}, "config.json")
    with pytest.raises(ConfigError, match="initial rule must be one of"):
        replace(config.initial, rule="round")


def test_defaults_are_those_of_transformers() -> None:
    from polyhead.families import families

    for name, family in families().items():
        theirs = hf.CONFIG_MAPPING.get(name) if name in hf.CONFIG_MAPPING else None
        wanted = getattr(theirs, family.initial_key, None) if theirs is not None else None
        if isinstance(wanted, float):
            assert family.initial.scale == wanted, name
