"""An encoder-decoder that reads sound: features in, text out (Whisper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.generation.batch import Generation
from polyhead.generation.encoder_decoder import EncoderDecoder
from polyhead.generation.stream import TextStream


class SpeechToText(EncoderDecoder):
    """A model that writes down what it hears; ``polyhead.load`` makes these.

    Args:
        transformer: an encoder-decoder whose encoder reads mel features.
        tokenizer: of the texts that it writes.
        origin: where it came from, in words.
        options: what generation does where a call does not say otherwise.
    """

    def stream(
        self,
        features: Tensor,
        *,
        prompt_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        **options: Any,
    ) -> TextStream:
        """The text of one recording, piece by piece.

        Args:
            features: ``[mels, frames]``, or ``[1, mels, frames]``.
            prompt_ids: tokens that the text begins with; default the start token.
            stop: end before this text, or before the first of several.
            options: fields of ``GenerationOptions``.

        Raises:
            InputError: features of another shape.
        """
        batch = self._batch(features)
        if len(batch) != 1:
            raise InputError(f"a stream reads one recording: got {len(batch)}; use generate")
        wanted = self.options.with_(**options)
        prompt = self.start_ids(wanted) if prompt_ids is None else prompt_ids
        return self._streamed(batch, prompt, wanted, stop)

    def generate(
        self,
        features: Tensor | list[Tensor],
        *,
        prompt_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """The text of a recording, or of each of several.

        Args:
            features: ``[mels, frames]`` of one; ``[B, mels, frames]``, or a list, of several.
            prompt_ids: tokens that every text begins with; default the start token.
            stop: texts end before this text, or before the first of several.
            cache: arguments of ``new_cache``.
            options: fields of ``GenerationOptions``.

        Returns:
            A ``Generation``; a list of them for several.

        Raises:
            InputError: features of another shape.
        """
        batch = self._batch(features)
        wanted = self.options.with_(**options)
        prompt = self.start_ids(wanted) if prompt_ids is None else prompt_ids
        found = self._generated(batch, [prompt] * len(batch), wanted, stop, cache)
        one = isinstance(features, Tensor) and features.ndim == 2
        return found[0] if one else found

    def _batch(self, features: Tensor | Sequence[Tensor]) -> Tensor:
        """``[B, mels, frames]``.

        Raises:
            InputError: another shape than the model reads.
            TypeError: no tensors.
        """
        given = [features] if isinstance(features, Tensor) else list(features)
        if not given or not all(isinstance(each, Tensor) for each in given):
            raise TypeError(
                "features must be a tensor [mels, frames] or [B, mels, frames], or a list of them"
            )
        frontend: Any = self.config.encoder.embedding and self.config.encoder.embedding.frontend
        wanted = (frontend.num_mel_bins, 2 * self.max_source)
        rows = [row for each in given for row in (each[None] if each.ndim == 2 else each)]
        for row in rows:
            if tuple(row.shape) != wanted or not row.is_floating_point():
                raise InputError(
                    f"features must be floats of {wanted[0]} mels × {wanted[1]:,} frames: got "
                    f"shape {list(row.shape)}, {row.dtype}"
                )
        return torch.stack(rows)
