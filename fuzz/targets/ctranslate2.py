"""CTranslate2 directories: model.bin's bytes, its options, and config.json."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import ctranslate2.specs as specs
import numpy as np
import torch
from ctranslate2.specs.model_spec import OPTIONAL, visit_spec

from fuzz import mutation
from polyhead.checkpoints import load_checkpoint

E, H, F, V = 8, 2, 12, 20
SIZES = {
    "encodings": (16, E),
    "gamma": (E,),
    "beta": (E,),
    "relative_attention_bias": (8, H),
    "conv1/weight": (E, 4, 3),
    "conv2/weight": (E, E, 3),
    "conv1/bias": (E,),
    "conv2/bias": (E,),
    "linear_0_noact/weight": (F, E),
    "ffn/linear_0/weight": (F, E),
    "ffn/linear_1/weight": (E, F),
    "self_attention/linear_0/weight": (3 * E, E),
    "self_attention/linear_0/bias": (3 * E,),
    "attention/linear_1/weight": (2 * E, E),
    "self_attention/linear_1/weight": (E, E),
    "linear_0/weight": (E, E),
    "linear_2/weight": (E, E),
    "weight": (V, E),
}
"""Shapes of variables by the ends of their names; the first that fits."""
folder = Path()


def spec(kind: str, seed: int = 0, **options: Any) -> Any:
    """A specification with random weights."""
    draws = np.random.default_rng(seed)
    made: Any
    if kind == "whisper":
        made = specs.WhisperSpec(2, H, 2, H)
    elif kind == "decoder":
        made = specs.TransformerDecoderModelSpec.from_config(2, H, **options)
    else:
        made = specs.TransformerSpec.from_config(2, H, **options)

    def fill(part: Any, name: str, value: Any) -> None:
        leaf = name.rsplit("/", 1)[-1]
        positions = leaf == "encodings" and kind == "whisper"
        wanted = value is None or positions or (leaf == "bias" and value == OPTIONAL)
        if leaf == "relative_attention_max_distance":
            setattr(part, leaf, np.int32(20))
        elif wanted and (size := _size(name)):
            setattr(part, leaf, draws.normal(0, 0.4, size).astype(np.float32))

    visit_spec(made, fill)
    if kind != "whisper":
        made.decoder.embeddings.weight = made.decoder.projection.weight
    if kind == "translation":
        made.encoder.embeddings[0].weight = made.decoder.projection.weight
        made.register_source_vocabulary(TOKENS)
        made.register_target_vocabulary(TOKENS)
    else:
        made.register_vocabulary(TOKENS)
    return made


def _size(name: str) -> tuple[int, ...] | None:
    return next((size for end, size in SIZES.items() if name.endswith(f"/{end}")), None)


TOKENS = ["<s>", "</s>", "<unk>", *(f"t{i}" for i in range(V - 3))]
KINDS: dict[str, dict[str, Any]] = {
    "translation": {"pre_norm": False, "layernorm_embedding": True},
    "whisper": {},
    "decoder": {"rotary_dim": 0, "rms_norm": True, "ffn_glu": True},
}


def prepare() -> None:
    global folder
    folder = Path(tempfile.mkdtemp())
    for kind in KINDS:
        for quantized in (None, "int8"):
            written(kind, quantized)


@functools.cache
def written(kind: str, quantized: str | None) -> dict[str, bytes]:
    """The files of a directory as they should be, by their names."""
    made = spec(kind, **KINDS[kind])
    made.validate()
    made.optimize(quantized)
    with tempfile.TemporaryDirectory() as place:
        made.save(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def case(random: Random) -> None:
    kind = random.choice(list(KINDS))
    files = dict(written(kind, random.choice((None, "int8"))))
    part = random.randrange(4)
    if part == 0:
        files["model.bin"] = mutation.data(random, files["model.bin"])
    elif part == 1:  # the beginning, where nothing else is read if it is wrong
        start = files["model.bin"]
        files["model.bin"] = mutation.data(random, start[:200]) + start[200:]
    elif part == 2:
        files["config.json"] = mutation.json_text(random, json.loads(files["config.json"]))
    else:
        options = dict(KINDS[kind])
        files["model.bin"] = _changed_option(random, files["model.bin"], options)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    loaded = load_checkpoint(folder)
    more = {}
    if kind != "decoder":
        sound = kind == "whisper"
        more["encoder_ids"] = torch.ones(1, 4, 8) if sound else torch.tensor([[1, 4]])
    with torch.no_grad():
        loaded.model(torch.tensor([[0, 3, 5]]), **more)


def _changed_option(random: Random, content: bytes, options: dict[str, Any]) -> bytes:
    """Another value for one variable without dimensions, well formed."""
    names = [
        name
        for name in (b"num_heads", b"pre_norm", b"activation", b"scale_embeddings", b"alibi")
        if name + b"\0" in content
    ]
    name = random.choice(names) + b"\0"
    at = content.index(name) + len(name) + 1  # behind the rank, which is 0
    size = int.from_bytes(content[at + 1 : at + 5], "little")
    return content[: at + 5] + random.randbytes(size) + content[at + 5 + size :]
