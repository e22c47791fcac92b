"""torch's nested tensors, whose rows have lengths of their own, as padded ones and back.

Shape letters: N batch, L tokens of the longest row, E features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError


def check(
    inputs: Mapping[str, Tensor], masks: Mapping[str, Tensor | None], *, batch_first: bool
) -> None:
    """Refuses what would mean something else than the rows one by one.

    Args:
        inputs: query, key and value by name, at least one of them nested.
        masks: Masks by the names of their arguments.
        batch_first: Whether the batch is the first dimension, as it is of nested tensors.

    Raises:
        UnsupportedError: Padded tensors beside nested ones, a mask, another layout, a trace.
        ValueError: Rows that are not ``[tokens, features]``, or keys and values of other lengths.
    """
    padded = [name for name, x in inputs.items() if not x.is_nested]
    given = [name for name, mask in masks.items() if mask is not None]
    wrong = None
    if padded:
        wrong = f"{padded[0]} is padded"
    elif given:
        wrong = f"{given[0]} is given"
    elif not batch_first:
        wrong = "batch_first is False"
    elif torch._C._is_tracing():
        wrong = "torch.jit.trace would record their lengths"
    if wrong is not None:
        raise UnsupportedError(
            "MultiheadAttention takes nested tensors only as query, key and value together, with "
            f"batch_first=True and without masks: {wrong}; pad them and pass key_padding_mask"
        )
    for name, x in inputs.items():
        if x.dim() != 3:
            raise ValueError(f"nested {name} must hold rows [tokens, features]: got {x.dim()}-D")
    key, value = lengths(inputs["key"]), lengths(inputs["value"])
    if key != value:
        raise ValueError(f"rows of key and value must be equally long: got {key} and {value}")


def lengths(nested: Tensor) -> list[int]:
    """Tokens of each row."""
    return [len(row) for row in nested.unbind()]


def beyond(nested: Tensor, padded: Tensor) -> Tensor:
    """``[N, L]``, True where ``padded [N, L, E]`` goes beyond the rows of ``nested``."""
    ends = torch.tensor(lengths(nested), device=padded.device)
    return torch.arange(padded.shape[1], device=padded.device) >= ends[:, None]


def like(nested: Tensor, padded: Tensor) -> Tensor:
    """``padded [N, L, E]`` as a nested tensor with the layout and lengths of ``nested``."""
    rows = [row[:n] for row, n in zip(padded, lengths(nested), strict=True)]
    made: Tensor
    if nested.layout == torch.jagged and nested.lengths() is None:  # type: ignore[attr-defined]
        # The same offsets, not equal ones: only then torch adds one tensor to the other.
        made = torch.nested.nested_tensor_from_jagged(
            torch.cat(rows),
            nested.offsets(),  # type: ignore[attr-defined]
        )
    else:
        made = torch.nested.as_nested_tensor(rows, layout=nested.layout)
    return made
