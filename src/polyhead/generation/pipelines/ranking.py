"""Scores of pairs of texts: cross-encoders, which read a query and a document together.

Source: the sentence-transformers library, whose numbers these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.errors import InputError, UnsupportedError, shortened
from polyhead.generation.pipelines.sentence_vectors import activated
from polyhead.generation.pipelines.tasks import Function, task_of

if TYPE_CHECKING:
    from polyhead.generation.pipelines.encoder_pipeline import EncoderPipeline


@dataclass(frozen=True)
class Ranked:
    """A document with its score.

    Attributes:
        index: Its place among the documents that were given.
        score: Of the query and the document.
        text: The document.
    """

    index: int
    score: float
    text: str


def predict(
    model: EncoderPipeline,
    encodings: Sequence[Any],
    function: Function | None,
    activation: str | None,
    batch_size: int,
) -> Tensor:
    """``[N]`` for a head of one class, else ``[N, C]``; float32.

    Args:
        function: What the caller names.
        activation: What the files name, one of ``sentence_modules.ACTIVATIONS``.
    """
    labels = task_of(model.config, "classify").num_labels
    if function not in (None, "softmax", "sigmoid", "none"):
        raise ValueError(
            f"function must be 'softmax', 'sigmoid', 'none' or None: got {shortened(function)}"
        )
    logits = torch.stack(model.run(encodings, batch_size)).float()
    if function == "softmax":
        logits = logits.softmax(dim=-1)
    elif function is None:
        logits = activated(logits, activation or ("Sigmoid" if labels == 1 else "Identity"))
    elif function == "sigmoid":
        logits = logits.sigmoid()
    return logits[:, 0] if labels == 1 else logits


def ranked(scores: Tensor, documents: Sequence[str], top_k: int | None) -> list[Ranked]:
    """The best first; of equal ones the earlier."""
    if scores.ndim != 1:
        raise UnsupportedError(
            f"rank needs a head of one class: this model has {scores.shape[1]}; use predict()"
        )
    count = (
        len(documents) if top_k is None else check_int("top_k", top_k, least=1, error=InputError)
    )
    order = scores.argsort(descending=True, stable=True)[:count]
    return [Ranked(i, float(scores[i]), documents[i]) for i in order.tolist()]
