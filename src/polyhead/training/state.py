"""A run's state as one file: weights, the optimiser's tensors, and how far it came.

One safetensors file, written whole or not at all, so that weights and optimiser can never be of
different steps; nothing in it is unpickled. Its metadata holds the rest as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polyhead._utils.atomic_write import write_tensors
from polyhead.errors import CheckpointError

FILE = "state.safetensors"
_KEY, _FORMAT = "polyhead.training", 1


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Writes the file.

    Args:
        facts: JSON, such as the number of steps done.

    Raises:
        OSError: It cannot be written; a full disk too. What was there before is left.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    said = json.dumps({"format": _FORMAT, **facts})
    write_tensors(path, whole, {_KEY: said})


def read_facts(path: Path) -> dict[str, Any]:
    """The facts stored beside the tensors.

    Raises:
        CheckpointError: There is no such file, or it is another or damaged.
    """
    return _read(path, tensors=False)[0]


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Puts a saved state into a model and an optimiser; returns its facts.

    Raises:
        CheckpointError: As ``read_facts``, or tensors that are not those of this model. Nothing
            is changed then.
    """
    facts, tensors = _read(path, tensors=True)
    parameters = dict(model.named_parameters())
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    found: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        if name.startswith("optimizer."):
            owner, _, key = name.removeprefix("optimizer.").rpartition(".")
            if owner not in parameters:
                raise CheckpointError(f"{path} has {name}: the model has no parameter {owner}")
            found.setdefault(owner, {})[key] = tensors[name]
    for name, tensor in wanted.items():
        have = tensors.get(name)
        if have is None or have.shape != tensor.shape:
            got = "nothing" if have is None else str(list(have.shape))
            raise CheckpointError(
                f"{path} is of another model: {name} must be {list(tensor.shape)}, got {got}"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
    for owner, values in found.items():
        parameter = parameters[owner]
        optimizer.state[parameter] = {
            key: value.clone()
            if value.ndim == 0 and not parameter.is_cuda
            else value.to(parameter.device, copy=True)
            for key, value in values.items()
        }  # copies: tensors of the file map it, and Windows replaces no mapped file
    return facts


def _read(path: Path, *, tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"there is no {path}: nothing was saved to resume from")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys() if tensors else ()
            values = {name: file.get_tensor(name) for name in names}
        facts = json.loads(metadata[_KEY])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not the state of a training run: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is a state of another version of polyhead")
    return facts, values
