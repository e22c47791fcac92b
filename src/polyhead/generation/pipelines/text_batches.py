"""Encodings of texts as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyhead.config.layout import SEGMENTS
from polyhead.errors import InputError
from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.models import Transformer


def padded(transformer: Transformer, encodings: Sequence[Any]) -> dict[str, Any]:
    """Arguments of an encoder: padded ``ids [B, T]``, ``lengths [B]``, their mask and segments."""
    device, config = transformer.embedding.like.device, transformer.config
    lengths = torch.tensor([len(each.ids) for each in encodings], device=device)
    shape = len(encodings), int(lengths.max())
    ids = torch.full(shape, config.pad_token_id or 0, device=device)
    for row, each in zip(ids, encodings, strict=True):
        row[: len(each.ids)] = torch.tensor(each.ids, device="cpu")
    made: dict[str, Any] = {"ids": ids, "lengths": lengths}
    made["mask"] = KeyLengths(lengths) if bool((lengths < shape[1]).any()) else None
    embedding = config.embedding
    typed = embedding.num_segments > 1 and not embedding.segments_optional  # not languages
    typed = typed or any(SEGMENTS in layer.attention.reads for layer in config.layers)
    if typed and any(any(each.type_ids) for each in encodings):
        made["segments"] = torch.zeros_like(ids)
        for row, each in zip(made["segments"], encodings, strict=True):
            row[: len(each.ids)] = torch.tensor(each.type_ids, device="cpu")
    return made


def listed(texts: Any) -> list[Any]:
    """Texts as a list.

    Raises:
        InputError: there are none.
    """
    found = list(texts)
    if not found:
        raise InputError("texts must hold at least one text: got none")
    return found
