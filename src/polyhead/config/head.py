"""Transforms and task heads after the last layer, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.feed_forward import ACTIVATIONS, Activation
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class HeadTransformConfig(Data):
    """norm(activation(W x + b)) of hidden states, before logits or classes.

    BERT's masked tokens: gelu and a norm; its pooler: tanh; OPT-350m: neither activation nor bias,
    down to the size of the embedding.

    Attributes:
        dim: Features of the result; None: embed_dim.
        activation: Activation behind the dense layer, or None.
        bias: Whether the projection has a bias.
        norm: Norm behind the activation, or None.
        tied: W is the embedding's projection, transposed, and there is nothing else (NeoMME).
    """

    dim: int | None = None
    activation: Activation | None = None
    bias: bool = True
    norm: NormConfig | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if self.tied and (self.bias, self.activation, self.norm) != (False, None, None):
            raise ConfigError(
                "a tied head transform has no bias, activation or norm: got "
                f"bias={self.bias}, activation={self.activation!r}, norm={self.norm}"
            )
        if self.dim is not None:
            check_whole("head transform dim", self.dim)
        check_choice("head transform activation", self.activation, (None, *ACTIVATIONS))
        if self.activation == "xielu":
            raise ConfigError("a head transform has no learned activation: got 'xielu'")

    def parameter_groups(self, features: int) -> Iterator[ParameterGroup]:
        """All parameters, for states of so many features."""
        dim = features if self.dim is None else self.dim
        if not self.tied:
            yield ParameterGroup("head", 1, dim * features, multiplied=False)
        if self.bias:
            yield ParameterGroup("head", 1, dim, multiplied=False)
        if self.norm is not None:
            yield ParameterGroup("norms", 1, self.norm.parameters(dim), multiplied=False)


def last_dim(features: int, transforms: Iterable[HeadTransformConfig]) -> int:
    """Features behind the last of some transforms, of states of so many features."""
    for transform in transforms:
        features = features if transform.dim is None else transform.dim
    return features


def transform_groups(
    features: int, transforms: Iterable[HeadTransformConfig]
) -> Iterator[ParameterGroup]:
    """All parameters of transforms, one after the other, for states of so many features."""
    for transform in transforms:
        yield from transform.parameter_groups(features)
        features = last_dim(features, (transform,))


@dataclass(frozen=True)
class TaskHeadConfig(Data):
    """Classes in place of logits over the vocabulary: ``transforms`` of pooled states, W x + b.

    Attributes:
        pooling: Which hidden state is classified: ``"first"`` (BERT's and ViT's class token),
            ``"last"`` (the last that is not padding), ``"mean"`` of all that are not padding,
            ``"end"`` (the first of the model's eos_token_ids: CLIP), or None: every token by
            itself (token classification; question answering is that with 2 labels).
        num_labels: Classes; 0: the pooled and transformed states are the result (sentence
            embeddings, CLIP's text projection).
        transforms: One after the other (BERT's sequence classification has the pooler alone).
        bias: Whether the classes have a bias.
        labels: Names of the classes; none: they have numbers alone.
        late: Every token is transformed and classified, and what comes of it is pooled (EuroBERT).
        spans: The two labels of a token are where an answer begins and where it ends (question
            answering).
    """

    pooling: Literal["first", "last", "mean", "end"] | None = None
    num_labels: int = 0
    transforms: tuple[HeadTransformConfig, ...] = ()
    bias: bool = True
    labels: tuple[str, ...] = ()
    late: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        check_choice("pooling", self.pooling, (None, "first", "last", "mean", "end"))
        check_whole("num_labels", self.num_labels, least=0)
        if not (self.pooling or self.num_labels or self.transforms):
            raise ConfigError("a task head needs a pooling, labels or a transform: got none")
        if self.labels and len(self.labels) != self.num_labels:
            raise ConfigError(
                f"labels must name num_labels={self.num_labels} classes: got {len(self.labels)}"
            )
        if any(each.tied for each in self.transforms):
            raise ConfigError("a tied head transform stands before logits: got a task")
        if self.late and self.pooling is None:
            raise ConfigError("late pooling needs a pooling: got None")
        if self.spans and (self.pooling is not None or self.num_labels != 2):
            raise ConfigError(
                "spans are 2 labels of every token: got "
                f"num_labels={self.num_labels}, pooling={self.pooling!r}"
            )

    def parameter_groups(self, features: int) -> Iterator[ParameterGroup]:
        """All parameters, for states of so many features."""
        yield from transform_groups(features, self.transforms)
        if self.num_labels:
            size = last_dim(features, self.transforms) + self.bias
            yield ParameterGroup("head", 1, self.num_labels * size, multiplied=False)
