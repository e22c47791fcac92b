"""GGUF files: metadata to a configuration, tensors to a state dict.

What the settings and the tensors mean is the family's to say (``polyhead.families``).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.gguf_file import GGUFFile
from polyhead.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from polyhead.checkpoints.parts import Parts, Progress, no_progress
from polyhead.errors import ConfigError
from polyhead.families import find_gguf, read_settings
from polyhead.families.common import config_json
from polyhead.families.common.gguf_rope import rope_tensors

_POOLINGS = {0: "mean", 1: "mean", 2: "first", 3: "last"}


def read_gguf(path: Path, progress: Progress = no_progress) -> Parts:
    """Reads a GGUF file.

    Args:
        path: the file.
        progress: called after every tensor; dequantising them is what takes the time.

    Raises:
        CheckpointError: the file is truncated, corrupt or not GGUF.
        ConfigError: its architecture, or a setting of it, is not supported (named).
    """
    file = GGUFFile(path)
    family = find_gguf(file.metadata, path)
    gguf = family.gguf
    if gguf is None:
        raise ConfigError(f"{path}: GGUF files of {family.model_type} are not read")
    settings = read_settings(
        gguf,
        file.metadata,
        file.tensors,
        path,
        lambda name: file.tensor(name).flatten().tolist(),
    )
    config = settings.read(
        lambda values: config_json.read_config(
            family, values, path, shown=settings.shown, hints=settings.hints
        )
    )
    tokenizer = tokenizer_from_gguf(file.metadata, path)
    table = gguf.table(family.tensors_of(settings.values))
    state: dict[str, Tensor] = {}
    file_names: dict[str, str] = {}
    settled = rope_tensors(file.tensors)
    names = [name for name in file.tensors if name not in settled]
    for done, (name, tensor) in enumerate(gguf.whole(names, file.tensor)):
        progress("reading tensors", done, len(names))
        if table.is_dropped(name):
            continue
        made, called = table.to_ours({name: tensor()}, config, path)
        state |= made
        file_names |= called
    progress("reading tensors", len(names), len(names))
    kind = file.metadata.get(f"{gguf.arch}.pooling_type", 1)
    return Parts(
        config,
        state,
        tokenizer,
        file_names=file_names,
        family=family.model_type,
        pooling=_POOLINGS.get(kind, f"pooling_type {kind}"),
        generation=GenerationConfig(
            where=str(path), start=file.metadata.get(f"{gguf.arch}.decoder_start_token_id")
        ),
    )
