"""An encoder with its tokenizer: texts in, one vector each out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyhead.checks import flag, whole
from polyhead.errors import ConfigError, ContextLengthError, InputError
from polyhead.semantics import KeyLengths

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer


class TextEncoder(nn.Module):
    """A model that reads text; ``polyhead.load`` makes these.

    Args:
        transformer: an encoder.
        tokenizer: its tokenizer.
        origin: where it came from, in words.

    Raises:
        ConfigError: the transformer is no encoder.
    """

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer, origin: str = "") -> None:
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

    @property
    def config(self) -> TransformerConfig:
        return self.transformer.config

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """What ``Transformer`` gives for ``ids [B, T]``, with its options.

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
        self, texts: str | Sequence[str], *, batch_size: int = 32, normalise: bool = True
    ) -> Tensor:
        """One vector per text: the mean of its tokens' hidden states, of length 1.

        Where the model pools by itself and has no classes (CLIP with its projection), that vector.
        Padding is masked, so a text's vector does not depend on its neighbours.

        Args:
            texts: the texts, or a single one.
            batch_size: texts that run at a time; those of similar length run together.
            normalise: divide each vector by its length, so that a dot product is the cosine.

        Returns:
            float32 ``[N, E]``, in the order of ``texts``.

        Raises:
            InputError: no texts, or an empty one.
            ContextLengthError: a text longer than the model's context; nothing is cut in silence.
        """
        batch_size = whole("batch_size", batch_size, least=1, error=ValueError)
        flag("normalise", normalise)
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise InputError("texts must hold at least one text: got none")
        tokens = [self._ids(number, text) for number, text in enumerate(texts)]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        vectors = torch.empty(len(tokens), self._vector_size)
        training = self.training
        self.eval()
        try:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                vectors[batch] = self._mean_states([tokens[i] for i in batch]).cpu()
        finally:
            self.train(training)
        return nn.functional.normalize(vectors, dim=-1) if normalise else vectors

    @property
    def _vector_size(self) -> int:
        task = self.config.task
        sizes = [each.dim for each in task.transforms if each.dim] if task is not None else []
        return sizes[-1] if self._gives_vectors and sizes else self.config.embed_dim

    def _ids(self, number: int, text: str) -> list[int]:
        if not text:
            raise InputError(f"text {number} is empty: give at least one character")
        ids = self.tokenizer.encode(text)
        most = self.config.max_positions
        if len(ids) > most:
            raise ContextLengthError(
                f"text {number} has {len(ids):,} tokens, the model's context holds {most:,}"
            )
        return ids

    def _mean_states(self, rows: list[list[int]]) -> Tensor:
        """``[B, E]`` float32: means over the tokens that are there."""
        device = self.transformer.embedding.table.device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        padding = self.config.pad_token_id or 0
        ids = torch.full((len(rows), int(lengths.max())), padding, device=device)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        padded = bool((lengths < ids.shape[1]).any())
        mask = KeyLengths(lengths) if padded else None
        if self._gives_vectors:
            vectors: Tensor = self.transformer(ids, mask=mask)
            return vectors.float()
        hidden: Tensor = self.transformer.hidden_states(ids, mask=mask)
        real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        return hidden.float().masked_fill(~real[..., None], 0.0).sum(dim=1) / lengths[:, None]

    def extra_repr(self) -> str:
        return self.origin
