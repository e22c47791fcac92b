"""Late interaction: a vector of each token, compared when query and document are both known.

    score(query, document) = Σ over tokens of the query of max over tokens of the document of q · d

Source: ColBERT (Khattab and Zaharia 2020), with the tokens of PyLate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.checkpoints.formats.sentence_modules import TOKENS, LateInteraction, Sentences
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.generation.pipelines import ranking
from polyhead.generation.pipelines.ranking import Ranked
from polyhead.generation.pipelines.sentence_vectors import largest_sums
from polyhead.generation.pipelines.text_encoder import TextEncoder
from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer


class MultiVectorEncoder(TextEncoder):
    """An encoder that gives every token of a text a vector (ColBERT); ``polyhead.load`` returns it.

    Args:
        transformer: an encoder-only ``Transformer``.
        tokenizer: tokenizer that the encoder was trained with.
        origin: where it came from, in words.
        pooling: ``"tokens"``.
        sentences: the projection, lengths and markers of queries and documents.

    Raises:
        ConfigError: not an encoder, or files that say nothing of late interaction.
        InputError: the tokenizer lacks a marker or the mask token.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        pooling: str = TOKENS,
        sentences: Sentences | None = None,
    ) -> None:
        super().__init__(transformer, tokenizer, origin, pooling, sentences)
        late = self._said.late
        if late is None:
            raise ConfigError("sentences must say how late interaction reads texts: got late=None")
        self._late: LateInteraction = late
        longest = max(late.query_length, late.document_length)
        if longest > self.config.max_positions:
            raise ConfigError(
                f"query_length {late.query_length} and document_length {late.document_length} must "
                f"be at most the model's context: {self.config.max_positions}"
            )
        self._query_marker, self._document_marker = (
            self._id(prefix) if prefix else None
            for prefix in (late.query_prefix, late.document_prefix)
        )
        self._mask = (
            self._id(tokenizer.special_tokens.get("mask_token") or "") if late.expand else 0
        )
        vocabulary = tokenizer.vocabulary
        self._skipped = frozenset(vocabulary[word] for word in late.skipped if word in vocabulary)

    def _id(self, token: str) -> int:
        found = self.tokenizer.vocabulary.get(token)
        if found is None:
            raise InputError(f"the tokenizer has no token {token!r}, which late interaction needs")
        return found

    def encode(self, texts: str | Sequence[str], **options: Any) -> Tensor:
        """Refused: a text has a vector for each token, not one.

        Raises:
            UnsupportedError: always; names the methods to use.
        """
        raise UnsupportedError(
            "this model gives every token a vector: use encode_queries() and encode_documents()"
        )

    @torch.no_grad()
    def encode_queries(
        self, texts: str | Sequence[str], *, batch_size: int = 32, truncate: bool = True
    ) -> list[Tensor]:
        """Vectors of the tokens of queries, of length 1.

        A short query is filled up with the mask token to ``query_length`` tokens, which have
        vectors too; a long one is cut.

        Args:
            texts: the queries, or a single one.
            batch_size: texts that run at a time.
            truncate: cut queries of more than ``query_length`` tokens; False: they are an error.

        Returns:
            For each query float32 ``[query_length, E]``; ``[T, E]`` where the model's files do
            not expand queries.

        Raises:
            InputError: no texts, or an empty one.
            ContextLengthError: a query is too long, without ``truncate``.
        """
        late = self._late
        return self._tokens(
            texts, late.query_length, self._query_marker, late.expand, batch_size, truncate
        )

    @torch.no_grad()
    def encode_documents(
        self, texts: str | Sequence[str], *, batch_size: int = 32, truncate: bool = True
    ) -> list[Tensor]:
        """Vectors of the tokens of documents, of length 1.

        Punctuation (``skiplist_words`` of the files) has none.

        Args:
            texts: the documents, or a single one.
            batch_size: texts that run at a time.
            truncate: cut documents of more than ``document_length`` tokens; False: they are an
                error.

        Returns:
            For each document float32 ``[T, E]``.

        Raises:
            InputError: no texts, or an empty one.
            ContextLengthError: a document is too long, without ``truncate``.
        """
        late = self._late
        return self._tokens(
            texts, late.document_length, self._document_marker, False, batch_size, truncate,
            self._skipped,
        )  # fmt: skip

    def scores(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        """Σ over a query's tokens of the largest dot product with a token of the document.

        Args:
            queries: what ``encode_queries`` returns.
            documents: what ``encode_documents`` returns.

        Returns:
            float32 ``[queries, documents]``.
        """
        return largest_sums([*queries], [*documents])

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        batch_size: int = 32,
        truncate: bool = True,
    ) -> list[Ranked]:
        """Documents by their late-interaction score for a query, the best first.

        Arguments are those of ``TextEncoder.rank``; texts that are too long are cut by default.
        """
        made = self.encode_documents(documents, batch_size=batch_size, truncate=truncate)
        asked = self.encode_queries(query, truncate=truncate)
        return ranking.ranked(self.scores(asked, made)[0], documents, top_k)

    def _tokens(
        self,
        texts: str | Sequence[str],
        length: int,
        marker: int | None,
        expand: bool,
        batch_size: int,
        truncate: bool,
        skipped: frozenset[int] = frozenset(),
    ) -> list[Tensor]:
        before = [] if marker is None else [marker]
        encodings = [
            _Ids([*read.ids[:1], *before, *read.ids[1:]])
            for read in self._read(texts, "", length - len(before), truncate)
        ]

        def vectors(ids: Tensor, lengths: Tensor, **options: Any) -> list[Tensor]:
            if expand:
                wide = ids.new_full((len(ids), length), self._mask)
                places = torch.arange(ids.shape[1], device=ids.device)
                wide[:, : ids.shape[1]] = ids.where(places < lengths[:, None], self._mask)
                ids = wide
                options["mask"] = None if self._late.attend else KeyLengths(lengths)
                lengths = torch.full_like(lengths, length)
            hidden: Tensor = self.transformer.hidden_states(ids, **options).float()
            made: Tensor = self.steps(hidden, True)
            kept = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            for token in skipped:
                kept &= ids != token
            return [row[keep] for row, keep in zip(made, kept, strict=True)]

        return self.run_batches(encodings, batch_size, vectors)


class _Ids:
    """Ids as an encoding of the tokenizer has them."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.type_ids = [0] * len(ids)
