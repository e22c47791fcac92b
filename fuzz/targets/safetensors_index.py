"""Directories of safetensors: the index of shards, and the shards themselves."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from fuzz import mutation
from polyhead.checkpoints.formats.safetensors_files import INDEX, read_tensors

SHARDS = ("model-1.safetensors", "model-2.safetensors")
TENSORS = ({"a": torch.ones(3, 4), "b": torch.ones(2)}, {"c": torch.ones(5).half()})
MAP = {name: shard for shard, held in zip(SHARDS, TENSORS, strict=True) for name in held}
directory = Path()


def prepare() -> None:
    global directory
    directory = Path(tempfile.mkdtemp())


def case(random: Random) -> None:
    kind = random.randrange(4)
    for shard, tensors in zip(SHARDS, TENSORS, strict=True):
        content = save(tensors)
        if kind == 0:
            # The length of the header is in front; where it is damaged, little else is ever read.
            content = mutation.data(random, content, start=random.choice((0, 8)))
        (directory / shard).write_bytes(content)
    index = {"metadata": {"total_size": 66}, "weight_map": MAP}
    text = json.dumps(index).encode() if kind == 0 else mutation.json_text(random, index)
    (directory / INDEX).write_bytes(text)
    tensors = read_tensors(directory)
    for name, tensor in tensors.items():
        assert isinstance(name, str)
        tensor.float().sum()
