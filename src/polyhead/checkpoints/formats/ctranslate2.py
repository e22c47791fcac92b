"""CTranslate2 directories: model.bin, config.json, vocabularies, often tokenizer.json.

The form in which faster-whisper and many OPUS-MT and NLLB models are distributed. Source:
``python/ctranslate2/specs/model_spec.py`` of OpenNMT/CTranslate2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints.formats.ctranslate2_file import CTranslate2File
from polyhead.checkpoints.formats.ctranslate2_layers import read_layers
from polyhead.checkpoints.formats.parts import Parts, Progress, no_progress
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.tokenizers.ctranslate2_tokenizer import read_vocabulary, tokenizers_of
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, shortened
from polyhead.families.common.keys import Keys

WEIGHTS = "model.bin"

_REVISIONS = {"TransformerSpec": 7, "TransformerDecoderSpec": 8, "WhisperSpec": 3}
"""The specifications that are read, each up to a revision."""

# How CTranslate2 treats texts and what it reports; the numbers are the same.
_HARMLESS = frozenset(("add_source_bos", "add_source_eos", "alignment_heads", "lang_ids"))


def read_ctranslate2(directory: Path, progress: Progress = no_progress) -> Parts:
    """Reads a CTranslate2 directory.

    Args:
        directory: CTranslate2 directory that holds model.bin.
        progress: called after every tensor.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
        ConfigError: its specification, or an option of it, is not supported (named).
    """
    file = CTranslate2File(directory / WEIGHTS)
    most = _REVISIONS.get(file.specification)
    if most is None or file.revision > most:
        known = ", ".join(f"{name} up to {number}" for name, number in _REVISIONS.items())
        raise ConfigError(
            f"{file.path}: its specification is {shortened(file.specification)}, revision "
            f"{file.revision}; supported are {known}"
        )
    said = directory / "config.json"
    keys = Keys(read_json(said) if said.is_file() else {}, said)
    config, table = read_layers(file, keys.number("layer_norm_epsilon", None))
    keys.take("multi_query_attention", None)  # model.bin has it too
    keys.expect("quantization_type", 0, None)
    for name in ("quantization_bits", "quantization_group_size"):
        keys.take(name, None)
    state: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    # A tied head and a shared table are one variable with several names.
    skipped = {"decoder/projection/weight"} if config.head == "tied" else set()
    if not config.encoder.own_tokens:
        skipped |= {"encoder/embeddings_0/weight", "encoder/embeddings/weight"}
    for side, embedding in (("decoder", config.embedding), ("encoder", config.encoder.embedding)):
        if embedding is not None and embedding.positions == "sinusoidal":
            skipped.add(f"{side}/position_encodings/encodings")  # which are computed
    shapes = [
        name
        for name, variable in file.variables.items()
        if variable.shape and not file.is_scale(name) and name not in skipped
    ]
    held: dict[int, Tensor] = {}  # aliases share memory: a file may have many
    for done, name in enumerate(shapes):
        progress("reading tensors", done, len(shapes))
        start = file.variables[name].start
        if start not in held:
            held[start] = file.tensor(name)
        made, _ = table.to_ours({name.replace("/", "."): held[start]}, config, file.path)
        state |= made
        names |= dict.fromkeys(made, name)
    progress("reading tensors", len(shapes), len(shapes))
    if file.specification == "WhisperSpec":
        _drop_key_biases(state, file.path)
    written = read_vocabulary(directory, "target", config.vocab_size)
    size = config.encoder.vocab_size or config.vocab_size
    read = read_vocabulary(directory, "source", size) if config.encoder_layers else written
    special = {
        name: keys.text(name) for name in ("bos_token", "eos_token", "unk_token") if keys.has(name)
    }
    tokenizer, target_tokenizer = tokenizers_of(directory, read, written, special)
    config, generation = _tokens(config, keys, written)
    if file.scalars().get("decoder/start_from_zero_embedding"):
        config, generation = _with_start(config, generation, state)
    keys.finish(_HARMLESS)
    return Parts(
        config,
        state,
        tokenizer,
        file_names=names,
        generation=GenerationConfig(generation, str(said)),
        target_tokenizer=target_tokenizer,
    )


def _drop_key_biases(state: dict[str, Tensor], path: Path) -> None:
    """Whisper's keys have no bias; where they are fused with values, the file has zeros for it."""
    for name in [name for name in state if name.endswith(".k_proj.bias")]:
        if state.pop(name).any():
            raise CheckpointError(f"{path}: keys of Whisper have a bias ({name}), which is not 0")


def _tokens(
    config: TransformerConfig, keys: Keys, vocabulary: list[str]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Special tokens, and how texts are generated in the words of generation_config.json."""
    ids = {token: number for number, token in enumerate(vocabulary)}
    sound = config.encoder.embedding is not None and config.encoder.embedding.frontend is not None

    def named(key: str, default: str | None = None) -> int | None:
        token = keys.text(key, default)
        return None if token is None else ids.get(token)

    bos, eos = named("bos_token"), named("eos_token", "<|endoftext|>" if sound else None)
    start = named("decoder_start_token", "<|startoftranscript|>" if sound else None)
    generation: dict[str, Any] = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "decoder_start_token_id": start,
        "suppress_tokens": [each for each in keys.numbers("suppress_ids", []) if each >= 0],
        "begin_suppress_tokens": keys.numbers("suppress_ids_begin", []),
    }
    made = replace(
        config,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=ids.get("<pad>"),
    )
    return made, {key: value for key, value in generation.items() if value not in (None, [])}


def _with_start(
    config: TransformerConfig, generation: dict[str, Any], state: dict[str, Tensor]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Turns a decoder whose first vector is zero into one with a token that has this vector.

    Marian models have it; transformers adds the same token as ``<pad>``. It is never generated.
    """
    start = config.vocab_size
    for name in ("embedding.tokens.weight", "head.weight"):
        if name in state:
            rows = state[name]
            state[name] = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    bias = state.get("head.bias", torch.zeros(start, dtype=torch.float32, device="cpu"))
    state["head.bias"] = torch.cat((bias, bias.new_full((1,), -math.inf)))
    made = replace(config, vocab_size=start + 1, head_bias=True, pad_token_id=start)
    return made, generation | {"decoder_start_token_id": start, "pad_token_id": start}
