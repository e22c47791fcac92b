"""GGUF files: metadata to a configuration, tensors to a state dict.

The families interpret settings and tensors (``polyhead.families``).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.checkpoints.formats.parts import Blocks, Parts, Progress, no_progress
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from polyhead.errors import ConfigError
from polyhead.families import find_gguf, read_settings
from polyhead.families.common import config_json
from polyhead.families.common.gguf_rope import rope_tensors
from polyhead.families.common.keys import Keys
from polyhead.native import code
from polyhead.quantization import BlockType, readable, unpack

_POOLINGS = {0: "mean", 1: "mean", 2: "first", 3: "last"}


def read_gguf(path: Path, progress: Progress = no_progress, *, keep: bool = False) -> Parts:
    """Reads a GGUF file.

    Args:
        path: path of the GGUF file.
        progress: called after every tensor; dequantizing them is what takes the time.
        keep: leave weights in blocks that native code reads in place; without native code, or of a
            type that it does not read, they are unpacked.

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
    state = gguf.tensors_held(file.metadata, len(config.layers), path)
    file_names: dict[str, str] = {}
    settled = rope_tensors(file.tensors)
    blocks: dict[str, Blocks] = {}
    names = [name for name in file.tensors if name not in settled]
    for done, (name, tensor) in enumerate(gguf.whole(names, file.tensor)):
        progress("reading tensors", done, len(names))
        if table.is_dropped(name):
            continue
        kept = _kept(file, name) if keep and table.moves_rows(name) else None
        given = tensor() if kept is None else kept[0]
        made, called = table.to_ours({name: given}, config, path)
        file_names |= called
        for ours, each in made.items():
            if kept is None:
                state[ours] = each
            elif each.ndim == 2:
                blocks[ours] = Blocks(each, kept[1])
            else:
                state[ours] = unpack(each, kept[1])
    progress("reading tensors", len(names), len(names))
    keys = Keys(file.metadata, path, prefix=f"{gguf.arch}.")
    kind = keys.whole("pooling_type", 1)
    return Parts(
        config,
        state,
        tokenizer,
        file_names=file_names,
        family=family.written_as or family.model_type,
        pooling=_POOLINGS.get(kind, f"pooling_type {kind}"),
        generation=GenerationConfig(
            where=str(path), start=keys.whole("decoder_start_token_id", None)
        ),
        blocks=blocks,
    )


def _kept(file: GGUFFile, name: str) -> tuple[Tensor, BlockType] | None:
    """A tensor's blocks, if native code reads them in place."""
    native = code()
    if native is None or name not in file.tensors or not file.is_quantized(name):
        return None
    found = file.blocks(name)
    return found if readable(native, found[1]) else None
