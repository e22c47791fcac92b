"""A model that goes on from what it remembers: what the search for texts drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.models import Transformer


class DecoderSteps:
    """A decoder and its cache; prompts of uneven length stand side by side.

    Args:
        model: The decoder, in evaluation mode.
        prompts: Tokens of each sentence, at least one.
        cache: Empty.
    """

    def __init__(
        self, model: Transformer, prompts: Sequence[Sequence[int]], cache: ModelCache
    ) -> None:
        self.model, self.prompts, self.cache = model, prompts, cache
        self._device = model.embedding.table.device
        self._one = torch.empty(1, 1, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def start(self) -> Tensor:
        longest = max(map(len, self.prompts))
        rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in self.prompts]
        ids = torch.tensor(rows, device=self._device)
        places = {}
        if min(map(len, self.prompts)) < longest:
            # Padding on the left stands below position 0, where the cache leaves it out.
            first = torch.tensor([len(prompt) - longest for prompt in self.prompts])
            places["positions"] = (first[:, None] + torch.arange(longest)).to(self._device)
        return self._last(self.model(ids, cache=self.cache, last=1, **places))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        if len(tokens) == 1:
            ids = self._one.fill_(tokens[0])
        else:
            ids = torch.tensor(tokens, device=self._device)[:, None]
        return self._last(self.model(ids, cache=self.cache, last=1))

    def reorder(self, rows: Sequence[int], sentences: Sequence[int]) -> None:
        self.cache.reorder(rows, sentences)

    def _last(self, logits: Tensor) -> Tensor:
        return logits[:, -1]


class TranslationSteps(DecoderSteps):
    """An encoder-decoder: sources of uneven length are read once, however many beams there are.

    Args:
        model: The encoder-decoder, in evaluation mode.
        sources: Tokens of each source, at least one.
        prompts: Tokens that each text begins with, equally many: the start token, and what a
            family puts behind it.
        cache: Empty.
    """

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        cache: ModelCache,
    ) -> None:
        super().__init__(model, prompts, cache)
        self.sources = sources

    @torch.inference_mode()
    def start(self) -> Tensor:
        lengths = torch.tensor([len(source) for source in self.sources], device=self._device)
        longest = int(lengths.max())
        rows = [[*source, *[0] * (longest - len(source))] for source in self.sources]
        mask = KeyLengths(lengths) if int(lengths.min()) < longest else None
        return self._last(
            self.model(
                torch.tensor([*self.prompts], device=self._device),
                encoder_ids=torch.tensor(rows, device=self._device),
                encoder_mask=mask,
                cache=self.cache,
                last=1,
            )
        )
