"""Hugging Face directories: config.json, safetensors, tokenizer.json.

The configuration is read by ``config_in``; here are the tables of tensor names and the few rules
about which tensors may be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints import block_float8, deepseek
from polyhead.checkpoints.config_in import FAMILIES, read_config
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.names import NameTable
from polyhead.checkpoints.parts import Parts
from polyhead.checkpoints.safetensors_files import read_tensors
from polyhead.checkpoints.tokenizer import Tokenizer
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError

_AROUND_LAYERS = {
    "embed_tokens": "embedding.tokens",
    "norm": "final_norm",
    "lm_head": "head",
    "layers.{i}.input_layernorm": "layers.{i}.attention_norm",
    "layers.{i}.post_attention_layernorm": "layers.{i}.feed_forward_norm",
    "layers.{i}.mlp.gate_proj": "layers.{i}.feed_forward.gate_proj",
    "layers.{i}.mlp.up_proj": "layers.{i}.feed_forward.up_proj",
    "layers.{i}.mlp.down_proj": "layers.{i}.feed_forward.down_proj",
}

_DECODER_NAMES = NameTable(
    prefix="model.",
    modules=_AROUND_LAYERS
    | {
        "layers.{i}.self_attn.q_proj": "layers.{i}.attention.q_proj",
        "layers.{i}.self_attn.k_proj": "layers.{i}.attention.k_proj",
        "layers.{i}.self_attn.v_proj": "layers.{i}.attention.v_proj",
        "layers.{i}.self_attn.o_proj": "layers.{i}.attention.o_proj",
        "layers.{i}.self_attn.q_norm": "layers.{i}.attention.q_norm",
        "layers.{i}.self_attn.k_norm": "layers.{i}.attention.k_norm",
    },
    unprefixed=frozenset(("lm_head",)),
    # A buffer that follows from the configuration, written by transformers before 4.32.
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)

_GEMMA_NAMES = replace(
    _DECODER_NAMES,
    modules=_DECODER_NAMES.modules
    | {
        "layers.{i}.post_attention_layernorm": "layers.{i}.attention_out_norm",
        "layers.{i}.pre_feedforward_layernorm": "layers.{i}.feed_forward_norm",
        "layers.{i}.post_feedforward_layernorm": "layers.{i}.feed_forward_out_norm",
    },
)

_DEEPSEEK_NAMES = NameTable(
    prefix="model.",
    modules=_AROUND_LAYERS
    | {
        "layers.{i}.self_attn.q_proj": "layers.{i}.attention.q_proj",
        "layers.{i}.self_attn.q_a_proj": "layers.{i}.attention.q_a_proj",
        "layers.{i}.self_attn.q_a_layernorm": "layers.{i}.attention.q_a_norm",
        "layers.{i}.self_attn.q_b_proj": "layers.{i}.attention.q_b_proj",
        "layers.{i}.self_attn.kv_a_proj_with_mqa": "layers.{i}.attention.kv_a_proj_with_mqa",
        "layers.{i}.self_attn.kv_a_layernorm": "layers.{i}.attention.kv_a_norm",
        "layers.{i}.self_attn.kv_b_proj": "layers.{i}.attention.kv_b_proj",
        "layers.{i}.self_attn.o_proj": "layers.{i}.attention.o_proj",
        "layers.{i}.mlp.gate": "layers.{i}.feed_forward.router",
        "layers.{i}.mlp.experts.{j}.gate_proj": "layers.{i}.feed_forward.experts.{j}.gate_proj",
        "layers.{i}.mlp.experts.{j}.up_proj": "layers.{i}.feed_forward.experts.{j}.up_proj",
        "layers.{i}.mlp.experts.{j}.down_proj": "layers.{i}.feed_forward.experts.{j}.down_proj",
        "layers.{i}.mlp.shared_experts.gate_proj": "layers.{i}.feed_forward.shared.gate_proj",
        "layers.{i}.mlp.shared_experts.up_proj": "layers.{i}.feed_forward.shared.up_proj",
        "layers.{i}.mlp.shared_experts.down_proj": "layers.{i}.feed_forward.shared.down_proj",
    },
    tensors={
        "layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.feed_forward.choice_bias",
    },
    unprefixed=frozenset(("lm_head",)),
)

_BERT_NAMES = NameTable(
    prefix="bert.",
    modules={
        "embeddings.word_embeddings": "embedding.tokens",
        "embeddings.position_embeddings": "embedding.positions",
        "embeddings.token_type_embeddings": "embedding.segments",
        "embeddings.LayerNorm": "embedding.norm",
        "encoder.layer.{i}.attention.self.query": "layers.{i}.attention.q_proj",
        "encoder.layer.{i}.attention.self.key": "layers.{i}.attention.k_proj",
        "encoder.layer.{i}.attention.self.value": "layers.{i}.attention.v_proj",
        "encoder.layer.{i}.attention.output.dense": "layers.{i}.attention.o_proj",
        "encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.attention_norm",
        "encoder.layer.{i}.intermediate.dense": "layers.{i}.feed_forward.up_proj",
        "encoder.layer.{i}.output.dense": "layers.{i}.feed_forward.down_proj",
        "encoder.layer.{i}.output.LayerNorm": "layers.{i}.feed_forward_norm",
    },
    leaves={"gamma": "weight", "beta": "bias"},
    # A buffer of 0, 1, 2, ...; and what comes after the hidden states, which are the output here:
    # the pooler over [CLS], and the pre-training heads.
    ignored=(r"embeddings\.position_ids", r"pooler\.dense\.(weight|bias)", r"cls\..+"),
)

OWN = "polyhead"
"""The model_type of directories whose config.json is a ``TransformerConfig`` as it is."""

_NAMES_OF_BODIES = {
    "decoder": _DECODER_NAMES,
    "gemma": _GEMMA_NAMES,
    "deepseek": _DEEPSEEK_NAMES,
    "bert": _BERT_NAMES,
}

NAMES: Mapping[str, NameTable] = {
    OWN: NameTable({}),
    **{name: _NAMES_OF_BODIES[family.body] for name, family in FAMILIES.items()},
}


def own_config(config: TransformerConfig) -> dict[str, Any]:
    """config.json's object in polyhead's own form."""
    return {"model_type": OWN, "transformer": config.to_dict()}


def read_directory(directory: Path) -> Parts:
    """Reads a Hugging Face directory; its tensors stay memory-mapped.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or a tied head differs.
        ConfigError: config.json says something that is not understood or not supported.
    """
    path = directory / "config.json"
    values = read_json(path)
    own = values.get("model_type") == OWN
    if own:
        config = TransformerConfig.from_dict(values.get("transformer", {}))
    else:
        config = read_config(values, path)
    names = NAMES[values["model_type"]]
    tensors = read_tensors(directory)
    blocks = None if own else block_float8.read_blocks(values, path)
    if blocks is not None:
        tensors = block_float8.widened(tensors, blocks, directory)
    tensors = deepseek.experts_apart(tensors)
    drafting = deepseek.of_drafting_layers(tensors, values)
    renamed = names.to_ours(name for name in tensors if name not in drafting)
    state = {ours: tensors[theirs] for ours, theirs in renamed.items()}
    if not own and values.get("rope_interleave", True):
        for name, tensor in state.items():
            state[name] = deepseek.rows_in_order(name, tensor, config, to_ours=True)
    if config.head == "tied":
        _drop_tied_copy(state, directory)
    tokenizer = (directory / "tokenizer.json").is_file()
    return Parts(
        config,
        state,
        Tokenizer.from_directory(directory) if tokenizer else None,
        ignored=tuple(name for name in tensors if name in drafting or names.is_ignored(name)),
        file_names=renamed,
    )


def _drop_tied_copy(state: dict[str, Tensor], directory: Path) -> None:
    """Some files store a tied head a second time; it has to be the embedding."""
    copy, embedding = state.pop("head.weight", None), state.get("embedding.tokens.weight")
    if copy is not None and embedding is not None and not torch.equal(copy, embedding):
        raise CheckpointError(
            f"{directory}: lm_head.weight differs from the embedding, though config.json says "
            f"tie_word_embeddings; one of the two is wrong"
        )
