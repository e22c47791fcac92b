"""Perplexity of a model on texts, computed reproducibly.

    perplexity = exp(−1/N Σ log p(token | tokens before it in its window))

A text longer than a window is read in windows that overlap; every token of a text but its first is
predicted exactly once, from as many tokens before it as its window holds. Perplexities of models
with different tokenizers cannot be compared, but their bits per byte can: the same sum, divided by
the UTF-8 bytes that the counted tokens stand for.

Shape letters: T tokens of a text, W of a window, B windows read side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.generation import LanguageModel
from polyhead.models import Transformer
from polyhead.training import loss
from polyhead.training.losses import IGNORED

Texts = str | Sequence[str | Tensor]
Progress = Callable[[str, int, int], None]

DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts texts; print it.

    Attributes:
        nats: Sum of −log p over the counted tokens.
        tokens: Number of counted tokens: all but the first of each text.
        bytes: Bytes of UTF-8 that the counted tokens stand for; None for texts given as tokens.
        window: Tokens per window.
        stride: Tokens from the beginning of one window to that of the next.
        windows: Number of windows.
    """

    nats: float
    tokens: int
    bytes: int | None
    window: int
    stride: int
    windows: int

    @property
    def perplexity(self) -> float:
        """exp(nats per token); infinite if that is too large for a float."""
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None if the number of bytes is not known."""
        return None if not self.bytes else self.nats / math.log(2) / self.bytes

    def __str__(self) -> str:
        parts = [f"perplexity {self.perplexity:,.4f} over {self.tokens:,} tokens"]
        if self.bits_per_byte is not None:
            parts.append(f"{self.bits_per_byte:.4f} bits per byte over {self.bytes:,} bytes")
        parts.append(f"{self.windows:,} windows of {self.window:,} tokens every {self.stride:,}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Span:
    """A window: tokens ``start`` to ``stop``, of which those from ``counted`` on are predicted."""

    start: int
    stop: int
    counted: int


def spans(length: int, window: int, stride: int) -> Iterator[Span]:
    """The windows over a text of ``length`` tokens.

    Args:
        stride: Less than ``window``, so that the first counted token has one before it.
    """
    start, counted = 0, 1
    while counted < length:
        stop = min(start + window, length)
        yield Span(start, stop, counted)
        start, counted = start + stride, stop


def perplexity(
    model: nn.Module,
    texts: Texts,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> Perplexity:
    """How well a decoder predicts texts.

        print(ph.perplexity(ph.load("smollm2"), open("book.txt").read()))

    Args:
        model: What ``load`` makes of a decoder; or a ``Transformer``, for texts that are tokens.
        texts: One text or several, or tensors ``[T]`` of tokens. Texts do not see each other.
        window: Tokens per window; default: the model's context, at most 1,024.
        stride: Tokens between the beginnings of windows, less than ``window``; default half of it.
            Small strides give every token a long past and take long.
        batch_size: Windows per batch.
        progress: Called as ``progress("perplexity", windows read, windows in all)``.

    Raises:
        InputError: No text with two tokens, or strings for a model without a tokenizer.
        ValueError: A number out of its range, or a model that is not a decoder with a head.
        TypeError: Texts are neither strings nor tensors.
    """
    transformer = decoder_of(model)
    most = transformer.config.max_positions
    chosen = check_int(
        "window", min(most, DEFAULT_WINDOW) if window is None else window, least=2, most=most
    )
    step = check_int("stride", chosen // 2 if stride is None else stride, least=1, most=chosen - 1)
    batch_size = check_int("batch_size", batch_size, least=1)
    rows, octets = token_rows(model, texts)
    work = [(row, span) for row in rows for span in spans(len(row), chosen, step)]
    if not work:
        raise InputError("texts must hold at least two tokens: there is nothing to predict")
    nats, was_training = 0.0, transformer.training
    transformer.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(work), batch_size):
                nats += _nats(transformer, work[first : first + batch_size])
                if progress is not None:
                    progress("perplexity", min(first + batch_size, len(work)), len(work))
    finally:
        transformer.train(was_training)
    counted = sum(span.stop - span.counted for _, span in work)
    return Perplexity(nats, counted, octets, chosen, step, len(work))


def decoder_of(model: nn.Module) -> Transformer:
    """The decoder that a model is or holds.

    Raises:
        ValueError: It holds none, or one without logits.
    """
    found = next((part for part in model.modules() if isinstance(part, Transformer)), None)
    if found is None or found.config.kind != "decoder" or found.head is None:
        kind = "no Transformer" if found is None else f"kind={found.config.kind!r}"
        raise ValueError(
            f"model must be a decoder with a head over its vocabulary: got {type(model).__name__}, "
            f"{kind}"
        )
    return found


def token_rows(model: nn.Module, texts: Texts) -> tuple[list[Tensor], int | None]:
    """The tokens of each text ``[T]``, and the bytes of all predicted ones where texts are text.

    Raises:
        InputError: A text for a model without a tokenizer; no texts.
        TypeError: Neither text nor a tensor of whole numbers.
    """
    several: Sequence[str | Tensor] = [texts] if isinstance(texts, str) else texts
    if isinstance(several, Tensor) or not isinstance(several, Sequence):
        raise TypeError(
            "texts must be a string, or a list of strings or [T] tensors: got "
            f"{type(texts).__name__}"
        )
    if not several:
        raise InputError("texts must hold at least one text: got none")
    rows, octets, known = [], 0, True
    for text in several:
        if isinstance(text, Tensor):
            if text.ndim != 1 or text.is_floating_point():
                raise TypeError(
                    f"tokens must be a [T] tensor of whole numbers: got {list(text.shape)}, "
                    f"{text.dtype}"
                )
            rows.append(text)
            known = False
        elif isinstance(text, str):
            if not isinstance(model, LanguageModel):
                raise InputError(
                    f"{type(model).__name__} has no tokenizer: give texts as [T] tensors of tokens"
                )
            tokens, tokenizer = model.tokenizer.encode(text), model.tokenizer
            rows.append(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
            octets += len(text.encode()) - _first_bytes(tokenizer.spans(text), text)
        else:
            raise TypeError(f"texts must be strings or [T] tensors: got {type(text).__name__}")
    return rows, octets if known else None


def _first_bytes(spans: Sequence[tuple[int, int]], text: str) -> int:
    """Bytes of the first token, which is not predicted; 0 if it stands for no text, like bos."""
    return len(text[: spans[0][1]].encode()) if spans else 0


def _nats(model: Transformer, work: Sequence[tuple[Tensor, Span]]) -> float:
    """−log probability of the predicted tokens of some windows. Padding on the right is masked."""
    longest = max(span.stop - span.start for _, span in work)
    ids = torch.zeros(len(work), longest, dtype=torch.int64, device="cpu")
    labels = torch.full_like(ids, IGNORED)
    for i, (row, span) in enumerate(work):
        size = span.stop - span.start
        ids[i, :size] = row[span.start : span.stop]
        labels[i, span.counted - span.start : size] = row[span.counted : span.stop]
    device = next(model.parameters()).device
    return float(loss(model, ids.to(device), labels.to(device), reduction="sum"))
