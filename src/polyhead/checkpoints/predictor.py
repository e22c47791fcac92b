"""A multi-token predictor from the directory of its model."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints.catalogue import find
from polyhead.checkpoints.formats.coded import Codes
from polyhead.checkpoints.formats.hugging_face import halves, put_numbers
from polyhead.checkpoints.formats.parts import Blocks, Parts
from polyhead.checkpoints.formats.safetensors_files import read_tensors
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.load import build_as
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, UnsupportedError, shortened
from polyhead.families import Family, families, find_family, read_config, text_of
from polyhead.families.common.config_json import differences
from polyhead.families.common.keys import Keys
from polyhead.families.common.predictors import PredictorFormat
from polyhead.families.common.quantization import read_scheme
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models.multi_token_predictor import MultiTokenPredictor
from polyhead.models.transformer import Transformer

_SHARED = "repeats the model's own, which the predictor shares"


def load_predictor(
    source: str | os.PathLike[str], model: Any, *, family: str | None = None
) -> MultiTokenPredictor:
    """Loads the module of multi-token prediction that a checkpoint holds behind its layers.

    It predicts the token after the next (DeepSeek-V3, 2024, §2.2). Of several modules only the
    first is loaded: it can be applied to its own output for tokens further on, for which the later
    ones were trained.

    Embedding and head are the model's, whatever copies of them the file holds. Weights have the
    model's dtype and device; codes stay as the file holds them where the model has such weights.

    Args:
        source: The Hugging Face directory, or the hub id, that the model was loaded from.
        model: What ``load`` returned for it, or its ``Transformer``.
        family: As the model was loaded with.

    Returns:
        In evaluation mode. It holds the model, which does not hold it.

    Raises:
        UnsupportedError: A GGUF file or a CTranslate2 directory, of which no module is read, or a
            family whose module is not read; the message lists those that are.
        CheckpointError: The directory has no module, its tensors are missing (which are named) or
            do not fit the configuration.
        ConfigError: The configuration is not that of ``model``, or is not understood.
        ModelNotFoundError: There is no such directory.
        TypeError: ``model`` is no language model.
    """
    transformer = getattr(model, "transformer", model)
    if not isinstance(transformer, Transformer):
        raise TypeError(f"model must be what load() returns: got {type(model).__name__}")
    resolved = find(source)
    if resolved.format != "hugging_face":
        kind = {"gguf": "a GGUF file", "ctranslate2": "a CTranslate2 directory"}[resolved.format]
        raise UnsupportedError(
            f"{resolved.path} is {kind}: a multi-token predictor is read from a Hugging Face "
            "directory alone"
        )
    like = transformer.embedding.like
    coded = any(isinstance(each, QuantizedMatrix) for each in transformer.modules())
    parts = _read(
        resolved.path,
        transformer.config,
        keep=coded and like.device.type == "cpu",
        dtype=like.dtype,
        family=family,
    )
    where = f"{resolved.path}: layer {len(transformer.config.layers)}"
    make = partial(MultiTokenPredictor, model=transformer)
    return build_as(make, parts, where, like.dtype, like.device)


def _read(
    directory: Path,
    model: TransformerConfig,
    *,
    keep: bool,
    dtype: torch.dtype,
    family: str | None,
) -> Parts:
    """The predictor's configuration and tensors, under its parameters' names."""
    path = directory / "config.json"
    text = text_of(read_json(path), path)
    if family is not None:
        text = replace(text, values={**text.values, "model_type": family})
    known = find_family(text.values.get("model_type"), text.where)
    form = _form(known, text.where)
    found = text.found(read_tensors(directory), directory)
    values = found.values
    said = text.read(read_config(values, text.where))
    if said != model:
        what = differences(model.to_dict(), said.to_dict())[0]
        raise ConfigError(f"{text.where}: the model is another than this: it has {what}")
    count = Keys(values, text.where, defaults=known.defaults).whole(form.key, 0)
    if count < 1:
        raise CheckpointError(
            f"{text.where}: {form.key} is {count}: the directory has no multi-token predictor"
        )
    layer = len(model.layers)
    values = form.with_one_more(values, count)
    longer = text.read(read_config(values, text.where))
    shared = "|".join(name.replace(".", r"\.") for name in form.repeats)
    table = known.tensors_of(values).extended(*form.rules(layer))
    table = replace(table, dropped={**table.dropped, rf"layers\.{layer}\.({shared})": _SHARED})
    place = f"layers.{layer}."
    tensors = {
        name: tensor
        for name, tensor in found.tensors.items()
        if name.removeprefix(table.prefix).startswith(place)
    }
    _check_repeats(tensors, form, place, model, directory)
    scheme = read_scheme(values, text.where)
    blocks: dict[str, Blocks] = {}
    kept_names: dict[str, str] = {}
    if scheme is not None:
        codes = Codes(tensors, scheme, directory)
        blocks, kept_names, _ = put_numbers(
            codes, tensors, table, longer, directory, keep=keep, dtype=dtype
        )
    state, names = table.to_ours(tensors, longer, directory)
    blocks |= halves(state) if blocks else {}
    missing = [
        f"{table.prefix}{place}{theirs}.weight"
        for theirs, ours in form.modules.items()
        if f"{ours}.weight" not in {*state, *blocks}
    ]
    if missing:
        raise CheckpointError(
            f"{directory}: {form.key} is {count}, but tensors of the multi-token predictor are "
            f"missing: {', '.join(missing)}"
        )

    def ours(name: str) -> str:
        return "layers.0." + name.removeprefix(place) if name.startswith(place) else name

    return Parts(
        replace(longer, layers=longer.layers[-1:]),
        {ours(name): tensor for name, tensor in state.items()},
        None,
        file_names={
            ours(name): found.names.get(theirs, theirs)
            for name, theirs in (names | kept_names).items()
        },
        blocks={ours(name): each for name, each in blocks.items()},
    )


def _form(known: Family, where: object) -> PredictorFormat:
    if known.predictor is None:
        read = ", ".join(sorted(name for name, each in families().items() if each.predictor))
        raise UnsupportedError(
            f"{where}: model_type is {known.model_type!r}, of which no multi-token predictor is "
            f"read; of these it is: {read}"
        )
    return known.predictor


def _check_repeats(
    tensors: dict[str, Tensor],
    form: PredictorFormat,
    place: str,
    model: TransformerConfig,
    directory: Path,
) -> None:
    """Copies of the embedding and the head must have their shape; they are not read."""
    shape = [model.vocab_size, model.embed_dim]
    ends = tuple(place + each for each in form.repeats)
    for name, tensor in tensors.items():
        if not name.endswith(ends) or not tensor.is_floating_point():  # codes have other shapes
            continue
        if [*tensor.shape] != shape:
            raise CheckpointError(
                f"{directory}: tensor {shortened(name)} must have shape {shape}, as the model's: "
                f"got {[*tensor.shape]}"
            )
