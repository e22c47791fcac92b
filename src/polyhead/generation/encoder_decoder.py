"""What encoder-decoders have in common, whatever their encoder reads: texts or sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyhead.errors import ConfigError, InputError
from polyhead.generation.batch import Generation, continued
from polyhead.generation.options import GenerationOptions
from polyhead.generation.steps import Sources
from polyhead.generation.stops import StopTexts
from polyhead.generation.stream import TextStream

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer

MAX_NEW_TOKENS = 512
"""Where neither the model's files nor the caller say how long a text may be."""


class EncoderDecoder(nn.Module):
    """An encoder-decoder with the tokenizer of what it writes.

    Args:
        transformer: an encoder-decoder.
        tokenizer: of the texts that it writes.
        origin: where it came from, in words.
        options: what generation does where a call does not say otherwise.

    Attributes:
        options: as given.

    Raises:
        ConfigError: the transformer is no encoder-decoder.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        options: GenerationOptions | None = None,
    ) -> None:
        super().__init__()
        if transformer.config.kind != "encoder-decoder":
            raise ConfigError(
                f"a {type(self).__name__} needs an encoder-decoder: got "
                f"kind={transformer.config.kind!r}"
            )
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.origin = origin
        self.options = options or GenerationOptions(max_new_tokens=MAX_NEW_TOKENS)

    @property
    def config(self) -> TransformerConfig:
        return self.transformer.config

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

    def new_cache(self, capacity: int = 0, **options: Any) -> ModelCache:
        """An empty cache, as of ``Transformer.new_cache``; it also holds what was read."""
        return self.transformer.new_cache(capacity, **options)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text, where ``options`` names no others."""
        return frozenset(self.config.eos_token_ids) or self.tokenizer.stop_ids

    def start_ids(self, options: GenerationOptions) -> list[int]:
        """The tokens that every text begins with.

        Raises:
            InputError: nobody says which.
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
    ) -> list[Generation]:
        """A generation for each source.

        Args:
            sources: token ids of each, or features ``[B, ...]``.
            prompts: tokens that each text begins with, which may differ in number.
            options: what is asked for.
            stop: texts end before this text, or before the first of several.
            cache: arguments of ``new_cache``.
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
        )

    def _streamed(
        self,
        source: Sources,
        prompt: Sequence[int],
        options: GenerationOptions,
        stop: str | Sequence[str] | None = None,
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
        )

    def extra_repr(self) -> str:
        return self.origin
