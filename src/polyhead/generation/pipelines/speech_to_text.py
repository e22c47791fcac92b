"""An encoder-decoder that reads sound: a recording in, text out (Whisper).

model = polyhead.load("whisper-tiny.en")
model.transcribe("talk.wav").text
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.generation.decoding.batch import Generation
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.stream import TextStream
from polyhead.generation.pipelines.encoder_decoder import EncoderDecoder
from polyhead.generation.pipelines.sound import HOP, RATE, cuts, log_mel, samples_of
from polyhead.generation.pipelines.speech_tokens import SpeechTokens
from polyhead.generation.pipelines.transcript import Segment, Transcript

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer


class SpeechToText(EncoderDecoder):
    """A speech recognition model (Whisper); ``polyhead.load`` returns it.

    Args:
        transformer: an encoder-decoder whose encoder reads mel features.
        tokenizer: tokenizer of the texts that it writes.
        origin: where it came from, in words.
        options: what generation does where a call does not say otherwise.

    Attributes:
        tokens: the tokens of languages and tasks.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        options: GenerationOptions | None = None,
    ) -> None:
        super().__init__(transformer, tokenizer, origin, options)
        self.tokens = SpeechTokens.of(tokenizer, transformer.config.vocab_size)

    def transcribe(
        self,
        sound: str | os.PathLike[str] | Tensor | Sequence[float],
        *,
        rate: int | None = None,
        language: str | None = None,
        task: str = "transcribe",
        prompt_ids: Sequence[int] | None = None,
        batch_size: int = 8,
        word_timestamps: bool = False,
        logprobs: int | None = None,
        **options: Any,
    ) -> Transcript:
        """Transcribes a recording of any length. A recording longer than the model's window (30 s)
        is cut at the quietest point in the last five seconds of each part; parts are transcribed
        independently.

        Args:
            sound: the path of an audio file, or samples ``[N]`` from −1 to 1 (a tensor, an array, a
                list).
            rate: samples per second; default 16,000.
            language, task, prompt_ids: as in ``generate``.
            batch_size: parts that run at a time.
            word_timestamps: find when each word is spoken, from the heads of the cross-attention
                that follow the sound; ``Segment.words`` holds them.
            logprobs: as in ``generate``; ``Segment.generation`` has them.
            options: fields of ``GenerationOptions``, such as ``num_beams``.

        Raises:
            InputError: a file that cannot be read or is damaged, no samples, or what ``generate``
                raises.
            TypeError: samples that are not floats.
        """
        batch_size = check_int("batch_size", batch_size, least=1, error=ValueError)
        samples = samples_of(sound, rate)
        spans = list(pairwise(cuts(samples, self._frames * HOP)))
        wanted = self.options.with_(**options)
        segments: list[Segment] = []
        for first in range(0, len(spans), batch_size):
            part = spans[first : first + batch_size]
            batch = torch.stack([self.features(samples[start:end]) for start, end in part])
            prompts = self._prompts(batch, wanted, language, task, prompt_ids)
            made = self._generated(batch, prompts, wanted, logprobs=logprobs)
            segments += [
                Segment(each.text.strip(), start / RATE, end / RATE, each, tuple(prompt))
                for each, prompt, (start, end) in zip(made, prompts, part, strict=True)
            ]
        if word_timestamps:
            from polyhead.interpret.word_times import with_words  # its one import of interpret

            segments = [with_words(self, samples, segment) for segment in segments]
        return Transcript(" ".join(each.text for each in segments if each.text), tuple(segments))

    def features(
        self, sound: str | os.PathLike[str] | Tensor | Sequence[float], rate: int | None = None
    ) -> Tensor:
        """``[mels, frames]`` of a recording: its first 30 s, filled with silence.

        Args:
            sound, rate: as in ``transcribe``.
        """
        return log_mel(samples_of(sound, rate), self._mels, self._frames)

    def detect_language(self, features: Tensor | Sequence[Tensor]) -> list[str]:
        """The code of the most likely language of each recording.

        Args:
            features: as in ``generate``.

        Raises:
            InputError: features of another shape.
        """
        batch = self._batch(features)
        known = self.tokens.languages
        if not known:
            return ["en"] * len(batch)
        weights = self.transformer.embedding.like
        start = torch.tensor([self.start_ids(self.options)] * len(batch), device=weights.device)
        with torch.inference_mode():
            source = batch.to(weights.device, weights.dtype)
            logits = self.transformer(start, encoder_ids=source, last=1)[:, -1]
        best = logits[:, list(known.values())].argmax(dim=-1).tolist()
        return [list(known)[number] for number in best]

    def prompt_ids(self, language: str = "en", task: str = "transcribe") -> list[int]:
        """The tokens that a text begins with: the start, the language, the task, and no times.

        Args:
            language, task: as in ``generate``.

        Raises:
            InputError: an unknown language or task.
        """
        tokens = self.tokens
        told = (tokens.language(language), tokens.task(task), tokens.no_timestamps)
        return [*self.start_ids(self.options), *(token for token in told if token is not None)]

    def stream(
        self,
        features: Tensor,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> TextStream:
        """The text of one recording, piece by piece.

        Args:
            features: ``[mels, frames]``, or ``[1, mels, frames]``.
            language, task, prompt_ids: as in ``generate``.
            stop: end before this text, or before the first of several.
            logprobs: as in ``generate``.
            options: fields of ``GenerationOptions``.

        Raises:
            InputError: features of another shape, an unknown language or task.
        """
        batch = self._batch(features)
        if len(batch) != 1:
            raise InputError(f"a stream reads one recording: got {len(batch)}; use generate")
        wanted = self.options.with_(**options)
        (prompt,) = self._prompts(batch, wanted, language, task, prompt_ids)
        return self._streamed(batch, prompt, wanted, stop, logprobs)

    def generate(
        self,
        features: Tensor | list[Tensor],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """The text of a recording, or of each of several.

        Args:
            features: ``[mels, frames]`` of one; ``[B, mels, frames]``, or a list, of several.
            language: the code of the language that is spoken (``"en"``); None: the one that
                ``detect_language`` finds.
            task: ``"transcribe"``, or ``"translate"`` into English.
            prompt_ids: tokens that every text begins with, in place of those that ``language`` and
                ``task`` mean.
            stop: texts end before this text, or before the first of several.
            cache: arguments of ``new_cache``.
            logprobs: also give the log-probability of each token, and those of so many likeliest
                tokens in its place; default: none.
            options: fields of ``GenerationOptions``.

        Returns:
            A ``Generation``; a list of them for several.

        Raises:
            InputError: features of another shape, an unknown language or task.
        """
        batch = self._batch(features)
        wanted = self.options.with_(**options)
        prompts = self._prompts(batch, wanted, language, task, prompt_ids)
        found = self._generated(batch, prompts, wanted, stop, cache, logprobs)
        one = isinstance(features, Tensor) and features.ndim == 2
        return found[0] if one else found

    @property
    def _mels(self) -> int:
        frontend: Any = self.config.encoder.embedding and self.config.encoder.embedding.frontend
        return int(frontend.num_mel_bins)

    @property
    def _frames(self) -> int:
        """Frames that the encoder reads, two for each of its positions."""
        return 2 * self.max_source

    def _prompts(
        self,
        batch: Tensor,
        options: GenerationOptions,
        language: str | None,
        task: str,
        prompt_ids: Sequence[int] | None,
    ) -> list[list[int]]:
        """The tokens that each text begins with."""
        if prompt_ids is not None:
            return [list(prompt_ids)] * len(batch)
        codes = self.detect_language(batch) if language is None else [language] * len(batch)
        return [[*self.start_ids(options), *self.prompt_ids(code, task)[1:]] for code in codes]

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
        wanted = (self._mels, self._frames)
        rows = [row for each in given for row in (each[None] if each.ndim == 2 else each)]
        for row in rows:
            if tuple(row.shape) != wanted or not row.is_floating_point():
                raise InputError(
                    f"features must be floats of {wanted[0]} mels × {wanted[1]:,} frames: got "
                    f"shape {list(row.shape)}, {row.dtype}"
                )
        return torch.stack(rows)
