"""Writes the files of the sentence-transformers library that ``sentence_modules`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyhead._utils.atomic_write import write_tensors
from polyhead.checkpoints.formats.safetensors_files import WEIGHTS
from polyhead.checkpoints.formats.sentence_modules import (
    KEYS,
    LATE_KEYS,
    LIMITS,
    METADATA,
    MODES,
    MODULES,
    POOLING,
    SEPARATOR,
    SETTINGS,
    Dense,
    Sentences,
)
from polyhead.checkpoints.json_file import write_json


def write_sentences(directory: Path, pooling: str, said: Sentences, width: int) -> None:
    """Writes what ``read_sentences`` reads, with modules.json last; removes what was there.

    Args:
        directory: Where the model is.
        pooling: As ``read_pooling`` says it.
        said: The rest; nothing of it is written where no modules.json said it.
        width: Numbers of a hidden state.
    """
    for name in (MODULES, SETTINGS, LIMITS, METADATA, f"{POOLING}/config.json"):
        (directory / name).unlink(missing_ok=True)
    if not said.modules:
        if pooling != "mean":
            (directory / POOLING).mkdir(exist_ok=True)
            write_json(directory / POOLING / "config.json", pooling_config(pooling, width))
        return
    kinds: list[tuple[str, str]] = [("Transformer", "")]
    if said.late is None:
        kinds.append(("Pooling", POOLING))
        (directory / POOLING).mkdir(exist_ok=True)
        config = pooling_config(pooling, width) | {"include_prompt": said.include_prompt}
        write_json(directory / POOLING / "config.json", config)
    for step in said.steps:
        kind = type(step).__name__
        folder = f"{len(kinds)}_{kind}"
        kinds.append((kind, folder))
        (directory / folder).mkdir(exist_ok=True)
        if isinstance(step, Dense):
            _write_dense(directory / folder, step)
    settings: dict[str, Any] = {
        "prompts": dict(said.prompts),
        "default_prompt_name": said.default_prompt,
        "similarity_fn_name": said.similarity if said.late is None else "MaxSim",
    }
    if said.late is not None:
        settings |= {theirs: getattr(said.late, ours) for theirs, ours in LATE_KEYS.items()}
    write_json(directory / SETTINGS, settings)
    limits: dict[str, Any] = {"do_lower_case": said.lower_case}
    if said.max_length is not None:
        limits["max_seq_length"] = said.max_length
    write_json(directory / LIMITS, limits)
    package = "sentence_transformers.models"
    places = {"Dense": "pylate.models.Dense.Dense"} if said.late is not None else {}
    rows = [
        {
            "idx": i,
            "name": str(i),
            "path": folder,
            "type": places.get(kind, f"{package}.{kind}"),
        }
        for i, (kind, folder) in enumerate(kinds)
    ]
    write_json(directory / MODULES, rows)


def pooling_config(pooling: str, width: int) -> dict[str, Any]:
    """What ``read_pooling`` reads, for hidden states of ``width`` numbers."""
    ours = {mode: theirs for theirs, mode in MODES.items()}
    modes = [ours.get(mode, mode) for mode in pooling.split(SEPARATOR)]
    keys = {KEYS.get(mode, f"pooling_mode_{mode}"): mode for mode in MODES}
    written: dict[str, Any] = {"word_embedding_dimension": width}
    if all(mode in MODES for mode in modes):
        return written | {key: mode in modes for key, mode in keys.items()}
    return written | dict.fromkeys(keys, False) | dict.fromkeys(modes, True)


def score_key(said: Sentences) -> dict[str, Any]:
    """What config.json says about a cross-encoder's scores."""
    if said.activation is None:
        return {}
    return {"sentence_transformers": {"activation_fn": _torch_name(said.activation)}}


def _torch_name(activation: str) -> str:
    return f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"


def _write_dense(folder: Path, step: Dense) -> None:
    config = {
        "in_features": step.weight.shape[1],
        "out_features": step.weight.shape[0],
        "bias": step.bias is not None,
        "activation_function": _torch_name(step.activation),
    }
    write_json(folder / "config.json", config | ({"use_residual": True} if step.residual else {}))
    named = {
        "linear.weight": step.weight,
        "linear.bias": step.bias,
        "residual.weight": step.projection,
    }
    tensors = {
        name: each.detach().cpu().contiguous() for name, each in named.items() if each is not None
    }
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
