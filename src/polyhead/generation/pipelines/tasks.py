"""Tasks of encoders with a head: classes of texts and tokens, masked tokens, answers.

The numbers are those of transformers' pipelines of the same tasks. Words and spans are places in
the text as it was given, counted in characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.errors import InputError, UnsupportedError, shortened

if TYPE_CHECKING:
    from polyhead.config import TaskHeadConfig, TransformerConfig
    from polyhead.generation.pipelines.encoder_pipeline import EncoderPipeline, Pair

Function = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class Label:
    """A class with its probability."""

    label: str
    score: float


@dataclass(frozen=True)
class Filled:
    """A token in place of a masked one.

    Attributes:
        token: Text of the token.
        score: Its probability there.
        token_id: Id of the token.
        position: Which token of the text is masked.
        text: The text with it.
    """

    token: str
    score: float
    token_id: int
    position: int
    text: str


@dataclass(frozen=True)
class Span:
    """A part of a text, ``text[start:end]``, with a class (or as an answer, without)."""

    text: str
    score: float
    start: int
    end: int
    label: str = ""


def classify(
    model: EncoderPipeline,
    texts: Sequence[str | Pair],
    function: Function | None,
    batch_size: int,
) -> list[list[Label]]:
    """All classes of each text, the likeliest first."""
    task = task_of(model.config, "classify")
    names = _names(task)
    if function not in (None, "softmax", "sigmoid", "none"):
        raise ValueError(
            f"function must be 'softmax', 'sigmoid', 'none' or None: got {shortened(function)}"
        )
    chosen = function or ("sigmoid" if len(names) == 1 else "softmax")
    found: list[list[Label]] = []
    for logits in model.run([model.encoded(i, text) for i, text in enumerate(texts)], batch_size):
        scores = _probabilities(logits, chosen).tolist()
        labels = [Label(name, score) for name, score in zip(names, scores, strict=True)]
        found.append(sorted(labels, key=lambda each: -each.score))
    return found


def fill(model: EncoderPipeline, text: str, top_k: int) -> list[Filled]:
    """The likeliest tokens in place of every mask token."""
    top_k = check_int("top_k", top_k, least=1, error=ValueError)
    if model.config.head is None:
        raise _refused(model.config, "fill")
    tokenizer = model.tokenizer
    mask = tokenizer.special_tokens.get("mask_token")
    if mask is None:
        raise UnsupportedError("fill needs a mask token: this model's tokenizer has none")
    encoding = model.encoded(0, text)
    masked = tokenizer.encode(mask, add_special=False)[0]
    places = [i for i, token in enumerate(encoding.ids) if token == masked]
    if not places:
        raise InputError(
            f"text must hold {mask} where a token is to be found: got {shortened(text)}"
        )
    logits = next(iter(model.run([encoding], 1)))
    found = []
    for place in places:
        scores, ids = logits[place].float().softmax(dim=-1).topk(min(top_k, logits.shape[-1]))
        for score, token in zip(scores.tolist(), ids.tolist(), strict=True):
            filled = [*encoding.ids[:place], token, *encoding.ids[place + 1 :]]
            whole_text = tokenizer.decode(filled, skip_special=len(places) == 1)
            word = tokenizer.decode([token], skip_special=False)
            found.append(Filled(word, score, token, place, whole_text))
    return found


def tag(
    model: EncoderPipeline,
    texts: Sequence[str],
    group: bool,
    ignored: Sequence[str],
    batch_size: int,
) -> list[list[Span]]:
    """The classes of each text's tokens, or of runs of tokens of a class."""
    task = task_of(model.config, "tag")
    names = _names(task)
    chosen: Function = "sigmoid" if len(names) == 1 else "softmax"
    encodings = [model.encoded(i, text) for i, text in enumerate(texts)]
    made = zip(texts, encodings, model.run(encodings, batch_size), strict=True)
    return [
        _spans(text, encoding, _probabilities(logits, chosen), names, group, ignored)
        for text, encoding, logits in made
    ]


def _spans(
    text: str, encoding: Any, scores: Tensor, names: Sequence[str], group: bool, ignored: Any
) -> list[Span]:
    best, kinds = scores.max(dim=-1)
    tokens = [
        (*encoding.offsets[i], names[int(kinds[i])], float(best[i]))
        for i, special in enumerate(encoding.special_tokens_mask)
        if not special
    ]
    found = []
    for run in _runs(tokens) if group else ([token] for token in tokens):
        label = _kind(run[0][2]) if group else run[0][2]
        start, end = run[0][0], run[-1][1]
        score = sum(token[3] for token in run) / len(run)
        found.append(Span(text[start:end], score, start, end, label))
    return [span for span in found if span.label not in ignored]


def _runs(tokens: Sequence[Any]) -> Iterator[list[Any]]:
    """Neighbours of one class; ``B-`` before a class begins another run of it."""
    number = 0
    numbers = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1][2] if i else token[2]
        number += token[2].startswith("B-") or _kind(token[2]) != _kind(before)
        numbers.append(number)
    for _, run in groupby(zip(numbers, tokens, strict=True), key=lambda each: each[0]):
        yield [token for _, token in run]


def _kind(label: str) -> str:
    return label.split("-", 1)[-1] if label.startswith(("B-", "I-")) else label


def answer(
    model: EncoderPipeline, question: str, context: str, top_k: int, longest: int
) -> list[Span]:
    """The likeliest spans of the context, whole words, the best first.

    A span's score is the product of the probabilities of its beginning and its end among the
    context's tokens and [CLS], where models that may find no answer put that.
    """
    top_k = check_int("top_k", top_k, least=1, error=ValueError)
    longest = check_int("longest", longest, least=1, error=ValueError)
    task_of(model.config, "answer")
    if not isinstance(context, str) or not context:
        raise InputError(f"context must be a text that is not empty: got {shortened(context)}")
    encoding = model.encoded(0, (question, context))
    first = torch.tensor([sequence == 1 for sequence in encoding.sequence_ids], device="cpu")
    possible = first.clone()
    name = model.tokenizer.special_tokens.get("cls_token")
    for i, token in enumerate(encoding.tokens):
        possible[i] |= token == name
    logits = next(iter(model.run([encoding], 1))).float()
    starts, ends = logits.masked_fill(~possible[:, None], -torch.inf).softmax(dim=0).T
    scores = torch.outer(starts, ends) * torch.outer(first, first)
    scores = scores.triu().tril(longest - 1)
    found: list[Span] = []
    values, places = scores.flatten().topk(min(top_k, int((scores > 0).sum())))
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        begin, end = _words(encoding, *divmod(place, len(first)))
        found.append(Span(context[begin:end], value, begin, end))
    return found


def _words(encoding: Any, first: int, last: int) -> tuple[int, int]:
    """The characters of the words that two tokens belong to."""
    begin, end = encoding.offsets[first][0], encoding.offsets[last][1]
    words = encoding.token_to_word(first), encoding.token_to_word(last)
    if None not in words:
        begin = encoding.word_to_chars(words[0], 1)[0]
        end = encoding.word_to_chars(words[1], 1)[1]
    return begin, end


def _probabilities(logits: Tensor, function: Function) -> Tensor:
    logits = logits.float()
    if function == "none":
        return logits
    return logits.sigmoid() if function == "sigmoid" else logits.softmax(dim=-1)


def _names(task: TaskHeadConfig) -> tuple[str, ...]:
    return task.labels or tuple(f"LABEL_{i}" for i in range(task.num_labels))


_NEEDS = {
    "classify": ("classes of texts", "ForSequenceClassification"),
    "tag": ("classes of tokens", "ForTokenClassification"),
    "answer": ("answers", "ForQuestionAnswering"),
    "fill": ("masked tokens", "ForMaskedLM"),
}


def _able(config: TransformerConfig) -> str | None:
    """The question that the head answers."""
    task = config.task
    if config.head is not None:
        return "fill"
    if task is None or not task.num_labels:
        return None
    return "answer" if task.spans else "tag" if task.pooling is None else "classify"


def task_of(config: TransformerConfig, asked: str) -> TaskHeadConfig:
    """The head that a question needs.

    Raises:
        UnsupportedError: The model has another, or none.
    """
    if config.task is None or _able(config) != asked:
        raise _refused(config, asked)
    return config.task


def _refused(config: TransformerConfig, asked: str) -> UnsupportedError:
    head, name = _NEEDS[asked]
    able = _able(config)
    has = "none" if able is None else f"one of {_NEEDS[able][0]}: use {able}()"
    return UnsupportedError(f"{asked} needs a head of {head} (a ...{name}); this model has {has}")
