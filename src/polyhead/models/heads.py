"""Output heads: logits over the vocabulary, or classes of pooled states.

Shape letters: B batch, T tokens, E embed size, W vocabulary size, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyhead.config import HeadTransformConfig, TaskHeadConfig, TransformerConfig
from polyhead.config.head import last_dim
from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.feed_forward import activate
from polyhead.layers.fixed import Fixed
from polyhead.layers.norms import build_norm
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models.embedding import Embedding
from polyhead.semantics import KeyLengths, Mask


class HeadTransform(Fixed):
    """norm(activation(W x + b)).

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Which of them there are.
    """

    _fixed = frozenset({"config", "dim"})

    def __init__(self, embed_dim: int, config: HeadTransformConfig) -> None:
        super().__init__()
        self.config = config
        self.dim = embed_dim if config.dim is None else config.dim
        self.dense = nn.Linear(embed_dim, self.dim, bias=config.bias)
        self.norm = None if config.norm is None else build_norm(self.dim, config.norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., dim]``."""
        x = self.dense(x)
        if self.config.activation is not None:
            x = activate(x, self.config.activation)
        return x if self.norm is None else self.norm(x)


class TiedTransform(Fixed):
    """The transpose of an embedding's projection.

    Args:
        embedding: Whose projection it is; a state dict holds it there alone.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # not a submodule: it belongs to the model

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., dim]``."""
        projected: Tensor = x @ self.__dict__["embedding"].projection.weight
        return projected


def _transforms(embed_dim: int, configs: Sequence[HeadTransformConfig]) -> nn.ModuleList:
    sizes = [last_dim(embed_dim, configs[:i]) for i in range(len(configs))]
    return nn.ModuleList(map(HeadTransform, sizes, configs))


def transformed(x: Tensor, transforms: nn.ModuleList) -> Tensor:
    """``x`` behind the transforms, one after the other; behind none as it is."""
    for transform in transforms:
        x = transform(x)
    return x


class Head(nn.Module):
    """The output matrix where it is not the embedding's, the output bias, and what comes before.

    Attributes:
        weight: ``[W, E]``, a parameter or quantized; None where the head is tied.
        beside: ``[W, config.head_beside]`` further columns of the matrix, or None; ``weight`` has
            as many fewer.
        bias: ``[W]`` or None.
        transforms: Before the logits.

    Args:
        config: Configuration of the model.
        embedding: Of the model, for a tied transform.
    """

    weight: nn.Parameter | QuantizedMatrix | None
    beside: nn.Parameter | None

    def __init__(self, config: TransformerConfig, embedding: Embedding) -> None:
        super().__init__()
        tied = any(each.tied for each in config.head_transforms)
        self.transforms = (
            nn.ModuleList([TiedTransform(embedding)])
            if tied
            else _transforms(config.hidden_dim, config.head_transforms)
        )
        size, beside = last_dim(config.hidden_dim, config.head_transforms), config.head_beside
        shape = (config.vocab_size, size - beside)
        self.weight = None if config.head == "tied" else nn.Parameter(torch.empty(shape))
        own = nn.Parameter(torch.empty(config.vocab_size, beside)) if beside else None
        self.register_parameter("beside", own)
        self.bias = nn.Parameter(torch.empty(config.vocab_size)) if config.head_bias else None


class TaskHead(Fixed):
    """Classes or pooled states in place of logits.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Pooling, transforms, labels.
        end_of_text: The ids of which the first is pooled with ``"end"``.
    """

    def __init__(
        self, embed_dim: int, config: TaskHeadConfig, end_of_text: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.config, self.end_of_text = config, end_of_text
        self.transforms = _transforms(embed_dim, config.transforms)
        size, count = last_dim(embed_dim, config.transforms), config.num_labels
        self.classifier = nn.Linear(size, count, bias=config.bias) if count else None

    def forward(self, hidden: Tensor, ids: Tensor, mask: Mask | None = None) -> Tensor:
        """``[B, T, E]`` to ``[B, T, C]``, or pooled to ``[B, C]``.

        Args:
            hidden: After the final norm.
            ids: What the model read.
            mask: Mask of the call; its ``KeyLengths`` say what is padding.
        """
        pooled, late = self.config.pooling is not None, self.config.late
        read = self._pooled(hidden, ids, mask) if pooled and not late else hidden
        x = transformed(read, self.transforms)
        if self.classifier is not None:
            x = self.classifier(x)
        return self._pooled(x, ids, mask) if late else x

    def _pooled(self, hidden: Tensor, ids: Tensor, mask: Mask | None) -> Tensor:
        if self.config.pooling == "first":
            return hidden[:, 0]
        rows = torch.arange(len(hidden), device=hidden.device)
        if self.config.pooling == "end":
            ends = torch.isin(ids, torch.tensor(self.end_of_text, device=ids.device))
            if not bool(ends.any(dim=1).all()):
                raise InputError(
                    f"pooling 'end' needs one of eos_token_ids={self.end_of_text} in every row"
                )
            return hidden[rows, ends.int().argmax(dim=1)]
        lengths = lengths_of(mask, hidden, "pooling")
        if self.config.pooling == "last":
            return hidden[rows, lengths - 1]
        real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        return (hidden * real[..., None]).sum(dim=1) / lengths[:, None]


def lengths_of(mask: Mask | None, rows: Tensor, reader: str) -> Tensor:
    """``[B]`` tokens that are not padding.

    Args:
        mask: Mask of the call.
        rows: ``[B, T, ...]`` ids or states.
        reader: What needs them, for the message.

    Raises:
        UnsupportedError: Another mask than ``KeyLengths``.
    """
    B, T = rows.shape[:2]
    every = torch.full((B,), T, device=rows.device)
    if mask is None:
        return every
    if not isinstance(mask, KeyLengths):
        raise UnsupportedError(f"{reader} understands no mask but KeyLengths: got {mask!r}")
    return mask.length.tensor(rows.device).expand(B)
