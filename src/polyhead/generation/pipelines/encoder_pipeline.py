"""An encoder with its tokenizer, as every task needs it: texts to encodings, batches to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation.pipelines import text_batches

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer

Pair = tuple[str, str]


class EncoderPipeline(nn.Module):
    """Base of ``TextEncoder``.

    Args:
        transformer: an encoder, or a decoder whose hidden states are pooled.
        tokenizer: tokenizer that it was trained with.
        origin: where it came from, in words.
    """

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer, origin: str) -> None:
        super().__init__()
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.origin = origin

    @property
    def config(self) -> TransformerConfig:
        return self.transformer.config

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """The output of ``Transformer`` for ``ids [B, T]``; takes its options.

        Returns:
            Hidden states ``[B, T, E]`` of a body alone, logits ``[B, T, W]`` with a head of masked
            tokens, classes ``[B, C]`` or ``[B, T, C]`` with a head of classes.
        """
        made: Tensor = self.transformer(ids, **options)
        return made

    def encoded(
        self, number: int, text: str | Pair, most: int | None = None, truncate: bool = False
    ) -> Any:
        """A text or two as the tokenizer's encoding.

        Args:
            number: number of the text, for messages.
            text: The text, or a pair of texts.
            most: Most tokens; None: the model's context.
            truncate: Cut what is longer.

        Raises:
            InputError: it is empty, or no text.
            ContextLengthError: it is longer than ``most``.
        """
        parts = text if isinstance(text, tuple | list) else (text,)
        if len(parts) not in (1, 2) or not all(parts):
            raise InputError(f"text {number} is empty: give at least one character")
        encoding = self.tokenizer.encoding(*parts)
        limit = self.config.max_positions if most is None else most
        if len(encoding.ids) <= limit:
            return encoding
        if truncate:
            return self.tokenizer.shortened(limit, *parts)
        context = limit == self.config.max_positions
        reason = f"the model's context holds {limit:,}" if context else f"max_length is {limit:,}"
        way = "" if most is None else ": shorten it, or give truncate=True"
        raise ContextLengthError(f"text {number} has {len(encoding.ids):,} tokens, {reason}{way}")

    def run(self, encodings: Sequence[Any], batch_size: int) -> list[Tensor]:
        """What the model gives for each text, on the CPU: ``[C]``, or for each of its tokens."""

        def outputs(ids: Tensor, lengths: Tensor, **options: Any) -> list[Tensor]:
            made: Tensor = self.transformer(ids, **options)
            if made.ndim == 2:
                return [*made]
            return [row[:length] for row, length in zip(made, lengths.tolist(), strict=True)]

        return self.run_batches(encodings, batch_size, outputs)

    def run_batches(
        self, encodings: Sequence[Any], batch_size: int, outputs: Callable[..., Iterable[Tensor]]
    ) -> list[Tensor]:
        """A tensor for each text, in their order; those of similar length run together."""
        batch_size = check_int("batch_size", batch_size, least=1, error=ValueError)
        order = sorted(range(len(encodings)), key=lambda i: len(encodings[i].ids))
        found: dict[int, Tensor] = {}
        training = self.training
        self.eval()
        try:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                made = outputs(
                    **text_batches.padded(self.transformer, [encodings[i] for i in batch])
                )
                found |= {i: each.cpu() for i, each in zip(batch, made, strict=True)}
        finally:
            self.train(training)
        return [found[i] for i in range(len(encodings))]

    def extra_repr(self) -> str:
        return self.origin
