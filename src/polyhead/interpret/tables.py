"""Numbers of all heads over many texts: their mean, their spread, and how two texts differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_several
from polyhead.errors import InputError
from polyhead.interpret.probe import Probe, probe
from polyhead.interpret.statistics import AVERAGED
from polyhead.models.parts import device_of

if TYPE_CHECKING:
    from polyhead.interpret.heads import TokenizedText

Text = str | Tensor
"""A text, which the model's own tokenizer splits, or its tokens ``[T]`` or ``[1, T]``."""


@dataclass(frozen=True)
class HeadTable:
    """Numbers of every head, text by text.

    Attributes:
        layers: The numbers of the layers.
        by_text: By name ``[texts, layers, heads]``. NaN where a layer has fewer heads than another.
    """

    layers: tuple[int, ...]
    by_text: Mapping[str, Tensor]

    def mean(self, name: str) -> Tensor:
        """``[layers, heads]`` over the texts."""
        return self.by_text[name].mean(dim=0)

    def spread(self, name: str) -> Tensor:
        """``[layers, heads]`` standard deviation over the texts; 0 of one text."""
        return self.by_text[name].std(dim=0, correction=0)

    def difference(self, name: str, first: int, second: int) -> Tensor:
        """``[layers, heads]`` by how much the second text's number is greater than the first's."""
        return self.by_text[name][second] - self.by_text[name][first]


def compare_texts(model: nn.Module, texts: Sequence[Text]) -> HeadTable:
    """Every head's statistics on each of several texts.

        table = ph.compare_texts(model, [prose, code])
        table.difference("entropy", 0, 1)  # [layers, heads]

    Args:
        model: As ``polyhead.load`` makes it; or, for texts that are tokens, anything that a probe
            can watch and that takes ids.
        texts: Texts, or their token ids ``[T]``; at least one.

    Returns:
        By the names of ``HeadSummary`` (``entropy``, ``first_token``, ``induction``, …) one mean
        over the queries for each text and head.

    Raises:
        InputError: ``texts`` is empty, or one text that is in no list.
    """
    check_several("texts", texts)
    if not texts:
        raise InputError("compare_texts needs at least one text: got none")
    rows: dict[str, list[Tensor]] = {}
    layers: tuple[int, ...] = ()
    for text in texts:
        seen = run_ids(model, ids_of(model, text))
        layers = seen.layers
        seen_means = [view.summary().means for view in seen]
        for name in AVERAGED:
            if all(name in means for means in seen_means):
                rows.setdefault(name, []).append(aligned([means[name] for means in seen_means]))
    return HeadTable(layers, {name: torch.stack(found) for name, found in rows.items()})


def tokenized(model: nn.Module, text: str) -> TokenizedText:
    """A text split by the model's tokenizer.

    Raises:
        InputError: The model has none.
    """
    from polyhead.interpret.heads import TokenizedText

    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InputError(f"{type(model).__name__} has no tokenizer: give token ids [T]")
    return TokenizedText.of(tokenizer, text)


def ids_of(model: nn.Module, text: Text) -> Tensor:
    """The token ids of a text, ``[1, T]``."""
    if isinstance(text, Tensor):
        return text.reshape(1, -1)
    return torch.tensor([tokenized(model, text).ids], device="cpu")


def run_ids(model: nn.Module, ids: Tensor) -> Probe:
    """Runs a model on tokens ``[B, T]`` with a probe on every layer."""
    # Logits of all tokens, over a large vocabulary, would cost more than the layers.
    decodes = getattr(getattr(model, "config", None), "kind", None) == "decoder"
    options = {"last": 1} if decodes else {}
    with probe(model) as seen, torch.inference_mode():
        model(ids.to(device_of(model)), **options)
    return seen


def aligned(rows: Sequence[Tensor]) -> Tensor:
    """``[layers, heads]`` from a row per layer; NaN fills where layers have fewer heads."""
    return torch.nn.utils.rnn.pad_sequence(
        [row.float().cpu() for row in rows], batch_first=True, padding_value=torch.nan
    )
