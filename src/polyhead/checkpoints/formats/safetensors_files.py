"""The tensors of a directory: one ``model.safetensors``, or shards with an index."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhead._utils.paths import size_of
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.rust import refusing
from polyhead.errors import CheckpointError, shortened

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"[^/\\:\x00-\x1f]*\.safetensors")  # : ends a drive of Windows
_LONGEST_NAME = 255
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory by the file's names, memory-mapped and private to this process.

    Raises:
        CheckpointError: no safetensors file, a shard is missing, or a file is truncated or corrupt.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        tensors |= read_tensor_file(path)
    return tensors


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the file is unreadable, truncated or corrupt.
    """
    from safetensors import safe_open

    size = size_of(path)
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    what = "empty" if size == 0 else "truncated or not a safetensors file"
    with (
        refusing(lambda why: CheckpointError(f"{path} is {what}: {why}")),
        safe_open(path, framework="pt") as file,
    ):
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _files(directory: Path) -> list[Path]:
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(directory, index)
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickled = [path.name for pattern in _PICKLED for path in sorted(directory.glob(pattern))]
    if pickled:
        raise CheckpointError(
            f"{directory} holds its weights only as a pickle ({pickled[0]}), and unpickling runs "
            f"whatever code it holds; this converts the tensors and runs none: "
            f"{_conversion(directory, pickled)}"
        )
    raise CheckpointError(f"{directory} holds no {WEIGHTS} and no {INDEX}")


def _conversion(directory: Path, pickled: list[str]) -> str:
    """The command that writes pickled tensors, of one file or of all shards, as safetensors."""
    shards = [name for name in pickled if name.startswith("pytorch_model")]
    paths = [str((directory / name).absolute()) for name in shards or pickled[:1]]
    target = str((directory / WEIGHTS).absolute())
    code = (
        "import torch; from safetensors.torch import save_file; "
        f'files = [torch.load(path, "cpu", weights_only=True) for path in {json.dumps(paths)}]; '
        "save_file({name: tensor.clone() for file in files for name, tensor in file.items()}, "
        f'{json.dumps(target)}, {{"format": "pt"}})'
    )
    quoted = subprocess.list2cmdline if os.name == "nt" else shlex.join
    return quoted([sys.executable, "-c", code])


def _shards(directory: Path, index: Path) -> list[Path]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} names {shortened(name)}, which is no file of its directory"
            )
    paths = [directory / name for name in dict.fromkeys(names)]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, though {INDEX} names it")
    return paths
