"""A model with its cache, as the search for texts drives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.generation.decoding.options import GenerationOptions
    from polyhead.models import Transformer

Sources: TypeAlias = Sequence[Sequence[int]] | Tensor
"""What an encoder reads: tokens of each source, or features ``[B, ...]``."""


class DecoderSteps:
    """A decoder and its cache; prompts of uneven length stand side by side.

    Args:
        model: The decoder, in evaluation mode.
        prompts: Tokens of each sentence, at least one.
        cache: An empty cache of the model.
    """

    def __init__(
        self, model: Transformer, prompts: Sequence[Sequence[int]], cache: ModelCache
    ) -> None:
        self.model, self.prompts, self.cache = model, prompts, cache
        self._device = model.embedding.like.device
        self._one = torch.empty(1, 1, dtype=torch.int64, device="cpu")

    @torch.inference_mode()
    def start(self) -> Tensor:
        return self._first()

    def _first(self, **options: Any) -> Tensor:
        """Reads the prompts; ``options`` are those of the model."""
        longest = max(map(len, self.prompts))
        rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in self.prompts]
        ids = torch.tensor(rows, device=self._device)
        if min(map(len, self.prompts)) < longest:
            # Padding on the left stands below position 0, where the cache leaves it out.
            first = torch.tensor([len(prompt) - longest for prompt in self.prompts], device="cpu")
            options["positions"] = (first[:, None] + torch.arange(longest, device="cpu")).to(
                self._device
            )
        return self._last(self.model(ids, cache=self.cache, last=1, **options))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        # On the CPU, where the model checks them without waiting for the device.
        if len(tokens) == 1:
            ids = self._one.fill_(tokens[0])
        else:
            ids = torch.tensor(tokens, device="cpu")[:, None]
        return self._last(self.model(ids, cache=self.cache, last=1))

    def reorder(self, rows: Sequence[int], sentences: Sequence[int]) -> None:
        self.cache.reorder(rows, sentences)

    def _last(self, logits: Tensor) -> Tensor:
        return logits[:, -1]


class TranslationSteps(DecoderSteps):
    """An encoder-decoder: sources of uneven length are read once, however many beams there are.

    Args:
        model: The encoder-decoder, in evaluation mode.
        sources: Tokens of each source, at least one; or features ``[B, ...]``, what the encoder's
            frontend reads.
        prompts: Tokens that each text begins with, at least one: the start token, and what a
            family puts behind it.
        cache: An empty cache of the model.
    """

    def __init__(
        self,
        model: Transformer,
        sources: Sources,
        prompts: Sequence[Sequence[int]],
        cache: ModelCache,
    ) -> None:
        super().__init__(model, prompts, cache)
        self.sources = sources

    @torch.inference_mode()
    def start(self) -> Tensor:
        if isinstance(self.sources, Tensor):
            weights = self.model.embedding.like
            return self._first(encoder_ids=self.sources.to(weights.device, weights.dtype))
        lengths = torch.tensor([len(source) for source in self.sources], device=self._device)
        longest = int(lengths.max())
        rows = [[*source, *[0] * (longest - len(source))] for source in self.sources]
        mask = KeyLengths(lengths) if int(lengths.min()) < longest else None
        ids = torch.tensor(rows, device=self._device)
        return self._first(encoder_ids=ids, encoder_mask=mask)


def steps_of(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    cache: ModelCache,
    sources: Sources | None = None,
) -> DecoderSteps:
    """The steps of a decoder, or of an encoder-decoder where there are sources."""
    if sources is None:
        return DecoderSteps(model, prompts, cache)
    return TranslationSteps(model, sources, prompts, cache)


def source_lengths(sources: Sources | None, count: int) -> list[int]:
    """Tokens (or frames) of each of ``count`` sources; 0 without an encoder."""
    if sources is None:
        return [0] * count
    if isinstance(sources, Tensor):
        return [sources.shape[-1]] * count
    return [len(source) for source in sources]


def check_search(
    options: GenerationOptions,
    vocab_size: int,
    sources: Sources | None,
    logprobs: int | None = None,
) -> None:
    """Raises ValueError where a search cannot do what ``options`` and ``logprobs`` ask for."""
    if logprobs is not None:
        check_int("logprobs", logprobs, least=0, most=vocab_size, error=ValueError)
    if options.num_beams > vocab_size:
        raise ValueError(
            f"num_beams must be at most {vocab_size:,}, the tokens of the vocabulary: got "
            f"{options.num_beams:,}"
        )
    for name, tokens in _tokens_of(options):
        for token in tokens:
            if token >= vocab_size:
                raise ValueError(
                    f"{name} must be tokens of the vocabulary, 0 to {vocab_size - 1:,}: got "
                    f"{token:,}"
                )
    if not isinstance(sources, Tensor):
        return
    for name, nothing in (("encoder_repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0)):
        if getattr(options, name) != nothing:
            raise ValueError(
                f"{name} is about the tokens of a source, and sound has none: got "
                f"{getattr(options, name)!r}"
            )


def _tokens_of(options: GenerationOptions) -> Iterator[tuple[str, Sequence[int]]]:
    """The tokens that rules write scores of, by the option that names them."""
    for word in options.bad_words_ids:
        yield "bad_words_ids", word
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_ids"):
        yield name, getattr(options, name)
    for name in ("forced_bos_token_id", "decoder_start_token_id"):
        token = getattr(options, name)
        yield name, () if token is None else (token,)
