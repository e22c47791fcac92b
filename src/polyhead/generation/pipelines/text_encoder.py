"""An encoder with its tokenizer: texts in; vectors, classes, tokens or answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool
from polyhead.checkpoints.formats.sentence_modules import POOLINGS, SEPARATOR, Sentences
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.generation.pipelines import ranking, sentence_vectors, tasks, text_batches
from polyhead.generation.pipelines.encoder_pipeline import EncoderPipeline, Pair
from polyhead.generation.pipelines.ranking import Ranked
from polyhead.generation.pipelines.tasks import Filled, Function, Label, Span

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer


class TextEncoder(EncoderPipeline):
    """An encoder with its tokenizer; ``polyhead.load`` returns it.

    Args:
        transformer: an encoder-only ``Transformer``.
        tokenizer: tokenizer that the encoder was trained with.
        origin: where it came from, in words.
        pooling: what ``encode`` makes of a text's hidden states: their ``"mean"``, ``"max"``,
            ``"mean_sqrt_len"`` or ``"weighted_mean"``, the ``"first"`` or the ``"last"``; several
            joined by ``"+"`` stand side by side. ``load`` takes it from the model's files.
        sentences: what the files of sentence-transformers say beside it: layers after the
            pooling, prompts, lengths, the similarity. ``load`` reads it.

    Raises:
        ConfigError: the transformer is not an encoder, and no files say that it makes vectors.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        pooling: str = "mean",
        sentences: Sentences | None = None,
    ) -> None:
        super().__init__(transformer, tokenizer, origin)
        kind = transformer.config.kind
        if kind != "encoder" and not (
            kind == "decoder" and sentences is not None and sentences.modules
        ):
            raise ConfigError(
                f"a TextEncoder needs an encoder: got kind={transformer.config.kind!r}"
            )
        if transformer.config.embedding.frontend is not None:
            raise ConfigError("a TextEncoder reads text: got an encoder of images or sound")
        self.pooling = pooling
        self._said = sentences or Sentences()
        self.steps = sentence_vectors.PostPooling(self._said.steps)
        length = self._said.max_length
        self.max_length = min(length or transformer.config.max_positions, self.config.max_positions)
        self.prompts = dict(self._said.prompts)

    @property
    def sentences(self) -> Sentences:
        """What sentence-transformers' files say of this model, with the weights as they are."""
        steps, length = self.steps.said(), self.max_length
        most = None if length == self.config.max_positions else length
        return replace(self._said, steps=steps, max_length=most, prompts=dict(self.prompts))

    @property
    def _gives_vectors(self) -> bool:
        """Whether the model makes one vector of a text by itself (CLIP)."""
        task = self.config.task
        return task is not None and task.pooling is not None and not task.num_labels

    @torch.no_grad()
    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        normalize: bool | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> Tensor:
        """One vector per text, as the model's files say: pooled hidden states (``pooling``), and
        what sentence-transformers' modules make of them. Without such files it is their mean, of
        length 1.

        Where the model pools by itself and has no classes (CLIP with its projection), that vector.
        Padding is masked, so a text's vector does not depend on its neighbours.

        Args:
            texts: the texts, or a single one.
            batch_size: texts that run at a time; those of similar length run together.
            normalize: divide each vector by its length, so that a dot product is the cosine; False:
                leave it. None: as the files say, and without files divide.
            prompt: what is put before each text: the name of one of ``prompts`` (``"query"``), or
                the text itself; ``""`` for none. None: the files' default, if any.
            truncate: cut texts of more than ``max_length`` tokens, as sentence-transformers does.

        Returns:
            float32 ``[N, E]``, in the order of ``texts``.

        Raises:
            InputError: no texts, or an empty one.
            ContextLengthError: a text of more than ``max_length`` tokens, without ``truncate``.
            UnsupportedError: the model's files pool in another way.
        """
        unknown = [mode for mode in self.pooling.split(SEPARATOR) if mode not in POOLINGS]
        if unknown and not self._gives_vectors:
            raise UnsupportedError(
                f"pooling is {self.pooling!r}, which is not built: set it to one of "
                f"{', '.join(map(repr, POOLINGS))}"
            )
        if normalize is not None:
            check_bool("normalize", normalize)
        check_bool("truncate", truncate)
        before = self._prompt(prompt)
        skipped = 0 if self._said.include_prompt else self._prompt_tokens(before)
        tokens = self._read(texts, before, self.max_length, truncate)

        def vectors(ids: Tensor, lengths: Tensor, **options: Any) -> Tensor:
            pooled = self._pooled(ids, lengths, skipped, **options)
            made: Tensor = self.steps(pooled, normalize)
            return made

        return torch.stack(self.run_batches(tokens, batch_size, vectors))

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """How alike vectors of ``encode`` are, by the measure that the model's files name.

        Args:
            a: ``[N, E]``.
            b: ``[M, E]``.

        Returns:
            ``[N, M]``: cosines (without files too), dot products, or negative distances.
        """
        return sentence_vectors.similarity(a, b, self._said.similarity)

    def _read(
        self, texts: str | Sequence[str], before: str, most: int, truncate: bool
    ) -> list[Any]:
        """The tokenizer's encodings of texts after a prompt, lower-cased if the files say so."""
        listed = text_batches.listed([texts] if isinstance(texts, str) else texts)
        made = []
        for number, text in enumerate(listed):
            if not isinstance(text, str) or not text:
                raise InputError(f"text {number} is empty: give at least one character")
            whole = before + text
            whole = whole.lower() if self._said.lower_case else whole
            made.append(self.encoded(number, whole, most, truncate))
        return made

    def _prompt(self, prompt: str | None) -> str:
        if prompt is None:
            name = self._said.default_prompt
            return "" if name is None else self.prompts.get(name, "")
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be a text: got {type(prompt).__name__}")
        return self.prompts.get(prompt, prompt)

    def _prompt_tokens(self, prompt: str) -> int:
        """Number of a prompt's tokens, special tokens before it included."""
        if not prompt:
            return 0
        encoding = self.tokenizer.encoding(prompt)
        return len(encoding.ids) - int(encoding.special_tokens_mask[-1])

    @torch.no_grad()
    def predict(
        self,
        pairs: Sequence[Pair],
        *,
        function: Function | None = None,
        batch_size: int = 32,
        truncate: bool = False,
    ) -> Tensor:
        """Scores of pairs of texts by a head of classes, as a cross-encoder gives them.

        Args:
            pairs: tuples of two texts, such as a query and a document.
            function: of the logits: ``"sigmoid"``, ``"softmax"`` or ``"none"``. None: what the
                files name; without that sigmoid for a single class, else none.
            batch_size: pairs that run at a time.
            truncate: cut pairs of more than ``max_length`` tokens, the longer text first.

        Returns:
            float32 ``[N]`` for a head of one class, else ``[N, C]``.

        Raises:
            UnsupportedError: the model has no such head.
            InputError: no pairs, or an empty text.
            ContextLengthError: a pair of more than ``max_length`` tokens, without ``truncate``.
        """
        encodings = [
            self.encoded(i, pair, self.max_length, check_bool("truncate", truncate))
            for i, pair in enumerate(text_batches.listed(pairs))
        ]
        return ranking.predict(self, encodings, function, self._said.activation, batch_size)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        batch_size: int = 32,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Documents by their score for a query, the best first; ``predict`` says how.

        Args:
            query: a text.
            documents: texts.
            top_k: so many; None: all.
            batch_size: pairs that run at a time.
            truncate: cut pairs that are too long.

        Raises:
            UnsupportedError: the model has no head of one class.
            InputError: no documents, or an empty text.
            ContextLengthError: a pair is too long.
        """
        pairs = [(query, document) for document in text_batches.listed(documents)]
        scores = self.predict(pairs, batch_size=batch_size, truncate=truncate)
        return ranking.ranked(scores, documents, top_k)

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
        made = tasks.classify(
            self, text_batches.listed([texts] if single else texts), function, batch_size
        )
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
        listed = text_batches.listed([texts] if single else texts)
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

    def _pooled(self, ids: Tensor, lengths: Tensor, skipped: int, **options: Any) -> Tensor:
        """``[B, E]`` float32, padding left out."""
        if self._gives_vectors:
            vectors: Tensor = self.transformer(ids, **options)
            return vectors.float()
        hidden: Tensor = self.transformer.hidden_states(ids, **options).float()
        return sentence_vectors.pool(hidden, lengths, self.pooling, skipped)
