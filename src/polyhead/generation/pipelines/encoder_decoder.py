"""What encoder-decoders have in common, whatever their encoder reads: texts or sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from polyhead.errors import InputError
from polyhead.generation.decoding.batch import Generation, continued
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.steps import Sources
from polyhead.generation.decoding.stops import StopTexts
from polyhead.generation.decoding.stream import TextStream
from polyhead.generation.pipelines.generative_model import GenerativeModel


class EncoderDecoder(GenerativeModel):
    """An encoder-decoder with the tokenizer of what it writes; see ``GenerativeModel``."""

    kind = "encoder-decoder"
    max_new_tokens = 512

    @property
    def max_source(self) -> int:
        """Tokens that the encoder has positions for."""
        return self.config.encoder.max_positions or self.config.max_positions

    def forward(self, source: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Logits ``[B, T, V]`` of the token after each of ``target``.

        Args:
            source: what the encoder reads, ``[B, S]`` ids or features ``[B, ...]``.
            target: ``[B, T]`` ids, the decoder's start token first.
            options: those of ``Transformer``, such as ``encoder_mask``.
        """
        logits: Tensor = self.transformer(target, encoder_ids=source, **options)
        return logits

    def encode(self, source: Tensor, **options: Any) -> Tensor:
        """The encoder's output ``[B, S, E]``; takes the options of ``Transformer.encode``."""
        return self.transformer.encode(source, **options)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text, where ``options`` names no others."""
        return frozenset(self.config.eos_token_ids) or self.tokenizer.stop_ids

    def start_ids(self, options: GenerationOptions) -> list[int]:
        """The tokens that every text begins with.

        Raises:
            InputError: neither the model's files nor the options name one.
        """
        start = options.decoder_start_token_id
        if start is None:
            start = self.config.bos_token_id
        if start is None:
            raise InputError(
                "the model's files name no decoder_start_token_id, and no bos_token_id in its "
                "place: give decoder_start_token_id"
            )
        return [start]

    def _generated(
        self,
        sources: Sources,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> list[Generation]:
        """A generation for each source.

        Args:
            sources: token ids of each, or features ``[B, ...]``.
            prompts: tokens that each text begins with, which may differ in number.
            options: what is asked for.
            stop: texts end before this text, or before the first of several.
            cache: arguments of ``new_cache``.
            logprobs: as in ``LanguageModel.generate``.
        """
        return continued(
            self.transformer,
            self.tokenizer,
            prompts,
            options,
            frozenset(options.eos_token_ids) or self.stop_ids,
            StopTexts(stop).stops,
            cache or {},
            sources,
            logprobs=logprobs,
        )

    def _streamed(
        self,
        source: Sources,
        prompt: Sequence[int],
        options: GenerationOptions,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
    ) -> TextStream:
        """One text, piece by piece; ``source`` holds one source.

        Raises:
            ValueError: beams, whose texts all end at once.
        """
        options.check_stream()
        return TextStream(
            self.transformer,
            self.tokenizer,
            prompt,
            options,
            frozenset(options.eos_token_ids) or self.stop_ids,
            StopTexts(stop),
            source,
            logprobs=logprobs,
        )
