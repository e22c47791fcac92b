"""An encoder with its tokenizer: texts in; vectors, classes, tokens or answers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_bool, check_int
from polyhead.errors import ConfigError, ContextLengthError, InputError, UnsupportedError
from polyhead.generation.pipelines import tasks
from polyhead.generation.pipelines.tasks import Filled, Function, Label, Pair, Span
from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer


POOLINGS = ("mean", "first", "last")


class TextEncoder(nn.Module):
    """An encoder with its tokenizer; ``polyhead.load`` returns it.

    Args:
        transformer: an encoder-only ``Transformer``.
        tokenizer: tokenizer that the encoder was trained with.
        origin: where it came from, in words.
        pooling: what ``encode`` makes of a text's hidden states: their ``"mean"``, the ``"first"``
            or the ``"last"``. ``load`` takes it from the model's files.

    Raises:
        ConfigError: the transformer is not an encoder.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        pooling: str = "mean",
    ) -> None:
        super().__init__()
        if transformer.config.kind != "encoder":
            raise ConfigError(
                f"a TextEncoder needs an encoder: got kind={transformer.config.kind!r}"
            )
        if transformer.config.embedding.frontend is not None:
            raise ConfigError("a TextEncoder reads text: got an encoder of images or sound")
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.origin = origin
        self.pooling = pooling

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

    @property
    def _gives_vectors(self) -> bool:
        """Whether the model makes one vector of a text by itself (CLIP)."""
        task = self.config.task
        return task is not None and task.pooling is not None and not task.num_labels

    @torch.no_grad()
    def encode(
        self, texts: str | Sequence[str], *, batch_size: int = 32, normalize: bool = True
    ) -> Tensor:
        """One vector per text, of length 1: the mean of its tokens' hidden states, or the first or
        last of them where the model's files say so (``pooling``).

        Where the model pools by itself and has no classes (CLIP with its projection), that vector.
        Padding is masked, so a text's vector does not depend on its neighbours.

        Args:
            texts: the texts, or a single one.
            batch_size: texts that run at a time; those of similar length run together.
            normalize: divide each vector by its length, so that a dot product is the cosine.

        Returns:
            float32 ``[N, E]``, in the order of ``texts``.

        Raises:
            InputError: no texts, or an empty one.
            ContextLengthError: a text longer than the model's context; nothing is cut in silence.
            UnsupportedError: the model's files pool in another way.
        """
        if self.pooling not in POOLINGS and not self._gives_vectors:
            raise UnsupportedError(
                f"pooling is {self.pooling!r}, which is not built: set it to one of "
                f"{', '.join(map(repr, POOLINGS))}"
            )
        check_bool("normalize", normalize)
        texts = _listed([texts] if isinstance(texts, str) else texts)
        tokens = [self.encoded(number, text) for number, text in enumerate(texts)]
        vectors = torch.stack([*self._each(tokens, batch_size, self._vectors)])
        return nn.functional.normalize(vectors, dim=-1) if normalize else vectors

    @overload
    def classify(
        self, texts: str | Pair, *, function: Function | None = ..., batch_size: int = ...
    ) -> list[Label]: ...
    @overload
    def classify(
        self,
        texts: list[str] | list[Pair],
        *,
        function: Function | None = ...,
        batch_size: int = ...,
    ) -> list[list[Label]]: ...
    @torch.no_grad()
    def classify(
        self, texts: Any, *, function: Function | None = None, batch_size: int = 32
    ) -> Any:
        """The classes of texts with their probabilities, the most likely first.

        Args:
            texts: the texts, or a single one; a tuple of two is a text with another beside it
                (does the one follow from the other?).
            function: of the logits: ``"softmax"``, ``"sigmoid"`` (classes that do not exclude each
                other), ``"none"``; None: sigmoid for a single class, else softmax.
            batch_size: texts that run at a time.

        Returns:
            For a single text a list of ``Label``; otherwise one such list for each.

        Raises:
            UnsupportedError: the model has no such head.
            InputError: no texts, or an empty one.
            ContextLengthError: a text longer than the model's context.
        """
        single = isinstance(texts, str | tuple)
        made = tasks.classify(self, _listed([texts] if single else texts), function, batch_size)
        return made[0] if single else made

    @torch.no_grad()
    def fill(self, text: str, *, top_k: int = 5) -> list[Filled]:
        """The most likely tokens for the mask token (``[MASK]``, ``<mask>``).

        Args:
            text: with the mask token, once or more often.
            top_k: so many for each.

        Returns:
            For each mask in turn, the likeliest first.

        Raises:
            UnsupportedError: the model has no head of masked tokens, or no mask token.
            InputError: the text has none.
        """
        return tasks.fill(self, text, top_k)

    @overload
    def tag(
        self, texts: str, *, group: bool = ..., ignored: Sequence[str] = ..., batch_size: int = ...
    ) -> list[Span]: ...
    @overload
    def tag(
        self,
        texts: list[str],
        *,
        group: bool = ...,
        ignored: Sequence[str] = ...,
        batch_size: int = ...,
    ) -> list[list[Span]]: ...
    @torch.no_grad()
    def tag(
        self,
        texts: Any,
        *,
        group: bool = True,
        ignored: Sequence[str] = ("O",),
        batch_size: int = 32,
    ) -> Any:
        """The classes of the tokens of texts: names, places, parts of speech.

        Args:
            texts: the texts, or a single one.
            group: neighbours of one class (``B-``, ``I-`` and so on) are one span, whose score
                is the mean of theirs.
            ignored: classes that are left out.
            batch_size: texts that run at a time.

        Returns:
            For a single text a list of ``Span``; otherwise one such list for each.

        Raises:
            UnsupportedError: the model has no such head.
            InputError: no texts, or an empty one.
        """
        single = isinstance(texts, str)
        listed = _listed([texts] if single else texts)
        made = tasks.tag(self, listed, check_bool("group", group), ignored, batch_size)
        return made[0] if single else made

    @torch.no_grad()
    def answer(
        self, question: str, context: str, *, top_k: int = 1, longest: int = 15
    ) -> list[Span]:
        """Finds the answer to a question in a text.

        Args:
            question: what is asked.
            context: the text; it has to fit into the model's context with the question.
            top_k: so many spans, the likeliest first.
            longest: most tokens of an answer.

        Raises:
            UnsupportedError: the model has no such head.
            InputError: an empty text.
            ContextLengthError: question and context are too long together.
        """
        return tasks.answer(self, question, context, top_k, longest)

    def encoded(self, number: int, text: str | Pair) -> Any:
        """A text or two as the tokenizer's encoding.

        Args:
            number: number of the text, for messages.
            text: The text, or a pair of texts.

        Raises:
            InputError: it is empty, or no text.
            ContextLengthError: it is longer than the model's context.
        """
        parts = text if isinstance(text, tuple) else (text,)
        if len(parts) not in (1, 2) or not all(parts):
            raise InputError(f"text {number} is empty: give at least one character")
        encoding = self.tokenizer.encoding(*parts)
        most = self.config.max_positions
        if len(encoding.ids) > most:
            raise ContextLengthError(
                f"text {number} has {len(encoding.ids):,} tokens, the model's context holds "
                f"{most:,}"
            )
        return encoding

    def run(self, encodings: Sequence[Any], batch_size: int) -> list[Tensor]:
        """What the model gives for each text, on the CPU: ``[C]``, or for each of its tokens."""

        def outputs(ids: Tensor, lengths: Tensor, **options: Any) -> list[Tensor]:
            made: Tensor = self.transformer(ids, **options)
            if made.ndim == 2:
                return [*made]
            return [row[:length] for row, length in zip(made, lengths.tolist(), strict=True)]

        return self._each(encodings, batch_size, outputs)

    def _each(
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
                made = outputs(**self._batch([encodings[i] for i in batch]))
                found |= {i: each.cpu() for i, each in zip(batch, made, strict=True)}
        finally:
            self.train(training)
        return [found[i] for i in range(len(encodings))]

    def _batch(self, encodings: Sequence[Any]) -> dict[str, Any]:
        """Arguments of the model: padded ids and their mask."""
        device = self.transformer.embedding.like.device
        lengths = torch.tensor([len(each.ids) for each in encodings], device=device)
        shape = len(encodings), int(lengths.max())
        ids = torch.full(shape, self.config.pad_token_id or 0, device=device)
        for row, each in zip(ids, encodings, strict=True):
            row[: len(each.ids)] = torch.tensor(each.ids, device="cpu")
        made: dict[str, Any] = {"ids": ids, "lengths": lengths}
        made["mask"] = KeyLengths(lengths) if bool((lengths < shape[1]).any()) else None
        embedding = self.config.embedding
        typed = embedding.num_segments > 1 and not embedding.segments_optional  # not languages
        if typed and any(any(each.type_ids) for each in encodings):
            made["segments"] = torch.zeros_like(ids)
            for row, each in zip(made["segments"], encodings, strict=True):
                row[: len(each.ids)] = torch.tensor(each.type_ids, device="cpu")
        return made

    def _vectors(self, ids: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        """``[B, E]`` float32, padding left out."""
        if self._gives_vectors:
            vectors: Tensor = self.transformer(ids, **options)
            return vectors.float()
        hidden: Tensor = self.transformer.hidden_states(ids, **options).float()
        if self.pooling != "mean":
            last = lengths - 1 if self.pooling == "last" else torch.zeros_like(lengths)
            return hidden[torch.arange(len(ids), device=ids.device), last]
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return hidden.masked_fill(~real[..., None], 0.0).sum(dim=1) / lengths[:, None]

    def extra_repr(self) -> str:
        return self.origin


def _listed(texts: Any) -> list[Any]:
    found = list(texts)
    if not found:
        raise InputError("texts must hold at least one text: got none")
    return found
