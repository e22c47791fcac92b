"""Models out: a directory that polyhead, transformers and others read, or polyhead alone.

config.json   model.safetensors (unfused)   tokenizer.json and its small companions
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from polyhead._utils.atomic_write import replace, write_tensors
from polyhead.checkpoints import generation_config
from polyhead.checkpoints.formats.hugging_face import own_config
from polyhead.checkpoints.formats.safetensors_files import INDEX, WEIGHTS
from polyhead.checkpoints.formats.sentence_writing import score_key, write_sentences
from polyhead.checkpoints.json_file import read_json, write_json
from polyhead.checkpoints.load import Checkpoint
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import find_family, write_config
from polyhead.layers.lora import LoraLinear
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models.quantized import unpacked_state

_CONFIG = "config.json"

# Files of a model that was there before, which would be read together with the new one.
_COMPANIONS = (
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def save_checkpoint(
    checkpoint: Checkpoint,
    directory: str | os.PathLike[str],
    *,
    form: Literal["hugging-face", "polyhead"] = "hugging-face",
) -> None:
    """Writes a model in Hugging Face form, under the names of its family; or in polyhead's own.

    All files are written to a hidden directory inside it first and moved into place when they are
    whole, so a failure or an interruption leaves what was there before.

    Args:
        checkpoint: what to save; its weights keep their dtype. Those that are in blocks, as a file
            holds them, are unpacked, with a warning.
        directory: made if need be; files of the same names in it are replaced.
        form: ``"polyhead"`` can say every configuration (layers that differ in their heads, say),
            and only polyhead reads it.

    Raises:
        ConfigError: no supported family can say the configuration (nothing is written).
        CheckpointError: the directory cannot be written.
    """
    target = Path(directory)
    if any(isinstance(module, LoraLinear) for module in checkpoint.model.modules()):
        raise ConfigError(
            "the model has an adapter beside its weights: merge() or remove() its adapter"
        )
    state = unpacked_state(checkpoint.model)
    if any(isinstance(module, QuantizedMatrix) for module in checkpoint.model.modules()):
        warnings.warn(
            f"weights in blocks of a few bits are saved unpacked: {target} takes more room than "
            "the file that they come from",
            stacklevel=2,
        )
    if form == "polyhead":
        config, weights = own_config(checkpoint.config), dict(state)
    else:
        config = write_config(checkpoint.config, checkpoint.family)
        table = find_family(config["model_type"], target).tensors_of(config)
        weights = table.to_theirs(state, checkpoint.config)
    config |= checkpoint.generation.for_config_json() | score_key(checkpoint.sentences)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    config["torch_dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    try:
        made = not target.exists()
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as partial:
                _write(Path(partial), config, weights, checkpoint)
                _publish(Path(partial), target)
            width = checkpoint.config.embed_dim
            write_sentences(target, checkpoint.pooling, checkpoint.sentences, width)
        except BaseException:
            if made:
                shutil.rmtree(target, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def _write(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], checkpoint: Checkpoint
) -> None:
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
    write_json(folder / _CONFIG, config)
    if checkpoint.has_tokenizer:
        checkpoint.tokenizer.save(folder)
    if values := checkpoint.generation.values:
        path = folder / generation_config.FILE
        written = read_json(path) if path.is_file() else {}
        write_json(path, {**written, **values})


def _publish(partial: Path, target: Path) -> None:
    """Moves whole files into place, config.json last: without it a directory is not a model.

    The weights come first: they may be mapped by a model, and then Windows leaves everything.
    """
    files = sorted(partial.iterdir(), key=lambda path: (path.name == _CONFIG, path.name != WEIGHTS))
    for path in files:
        replace(path, target / path.name)
    for name in {*_COMPANIONS} - {path.name for path in files}:
        (target / name).unlink(missing_ok=True)
