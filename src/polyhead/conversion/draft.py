"""A model in the middle of being rewritten: its configuration and its weights in float64.

Every step of a conversion is a function that changes a draft. ``Draft.build`` makes a model of it.

Shape letters: H query heads, G kv heads, D head size, V value size, E embed size, P rotated
features of a head, R latent size, N features of a latent key that are not rotated.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyhead.config import (
    AttentionConfig,
    HeadLayout,
    LatentAttentionConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.layers.lora import LoraLinear
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models import Transformer
from polyhead.models.quantized import unpacked_state
from polyhead.training.evaluation import decoder_of

Model = TypeVar("Model", Transformer, LanguageModel)


class Draft:
    """Configuration and weights, changed step by step.

    Attributes:
        state: All parameters by name, float64 on the CPU.
    """

    def __init__(self, config: TransformerConfig, state: dict[str, Tensor]) -> None:
        self.config, self.state = config, state

    @classmethod
    def of(cls, model: nn.Module) -> Draft:
        """A copy of a decoder's weights.

        Raises:
            InputError: A model in training mode.
            UnsupportedError: Layers that share weights, or an adapter beside the weights.
            ValueError: No decoder with a head.
        """
        transformer = source_of(model)
        weights = unpacked_state(transformer)
        if any(isinstance(each, QuantizedMatrix) for each in transformer.modules()):
            count = sum(tensor.numel() for tensor in weights.values())
            warnings.warn(
                f"quantized weights are unpacked for the conversion: {8 * count / 2**30:.1f} GiB "
                "of float64 while it runs, and the result stays unpacked",
                stacklevel=3,
            )
        state = {
            name: tensor.detach().to("cpu", torch.float64, copy=True)
            for name, tensor in weights.items()
        }
        return cls(transformer.config, state)

    def copy(self) -> Draft:
        """Weights are shared: steps replace tensors and change none in place."""
        return Draft(self.config, dict(self.state))

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
        """The model, in evaluation mode."""
        with torch.device("meta"):
            model = Transformer(self.config)
        buffers = {name for name, _ in model.named_buffers()}
        state = {
            name: tensor.to(device, tensor.dtype if name in buffers else dtype)
            for name, tensor in self.state.items()
        }
        model.load_state_dict(state, strict=True, assign=True)
        return model.eval()

    @property
    def layers(self) -> range:
        return range(len(self.config.layers))

    def layer(self, index: int) -> LayerConfig:
        return self.config.layers[index]

    def heads(self, index: int, what: str) -> AttentionConfig:
        """The attention of a layer, which must be MHA, GQA or MQA.

        Args:
            what: Name of the operation, for the message.

        Raises:
            UnsupportedError: The layer's attention is not MHA, GQA or MQA.
        """
        found = self.layer(index).attention
        if type(found) is not AttentionConfig:
            raise UnsupportedError(
                f"{what} needs heads with keys and values of their own: layer {index} is "
                f"{found.described}"
            )
        if not found.projects_values or found.hands_on_keys:
            raise UnsupportedError(
                f"{what} needs values that v_proj alone makes, and keys that no other layer reads: "
                f"layer {index} has others"
            )
        return found

    def latent(self, index: int, what: str) -> LatentAttentionConfig:
        """The attention of a layer, which must be latent.

        Raises:
            UnsupportedError: The layer's attention is not latent.
        """
        found = self.layer(index).attention
        if type(found) is not LatentAttentionConfig:
            raise UnsupportedError(
                f"{what} needs latent attention: layer {index} is {found.described}"
            )
        return found

    def set_attention(self, index: int, config: HeadLayout) -> None:
        """Another configuration of a layer's attention; the caller then changes its weights."""
        layers = list(self.config.layers)
        layers[index] = replace(layers[index], attention=config)
        self.config = replace(self.config, layers=tuple(layers))

    def get(self, index: int, name: str) -> Tensor:
        """A parameter of a layer's attention."""
        return self.state[_key(index, name)]

    def find(self, index: int, name: str) -> Tensor | None:
        return self.state.get(_key(index, name))

    def put(self, index: int, **parameters: Tensor) -> None:
        """New parameters of a layer's attention: ``q_proj=`` is its weight, ``q_proj_bias=`` its
        bias."""
        for name, tensor in parameters.items():
            leaf = "bias" if name.endswith("_bias") else "weight"
            name = name.removesuffix("_bias")
            full = name if name == "sinks" else f"{name}.{leaf}"
            self.state[_key(index, full)] = tensor.contiguous()

    def clear(self, index: int) -> None:
        """Forgets all parameters of a layer's attention."""
        start = _key(index, "")
        self.state = {n: tensor for n, tensor in self.state.items() if not n.startswith(start)}


def _key(index: int, name: str) -> str:
    return f"layers.{index}.attention.{name}"


def source_of(model: nn.Module) -> Transformer:
    """The decoder that a model is or holds, if it can be converted.

    Raises:
        InputError: A model in training mode.
        UnsupportedError: Layers that share weights, or an adapter beside the weights.
        ValueError: No decoder with a head.
    """
    transformer = decoder_of(model)
    if transformer.training:
        raise InputError(
            "the model is in training mode, in which outputs are random: call eval() first"
        )
    if transformer.config.weights_of:
        raise UnsupportedError("layers that share weights cannot be converted one by one")
    if any(isinstance(part, LoraLinear) for part in transformer.modules()):
        raise UnsupportedError(
            "the model has an adapter beside its weights: call merge() of the adapter first"
        )
    return transformer


def wrapped(model: Model, made: Transformer, words: str) -> Model:
    """``made`` as a model of the kind of ``model``, with its tokenizer and options."""
    if isinstance(model, Transformer):
        return made
    return type(model)(made, model.tokenizer, f"{model.origin}, {words}", model.options).eval()
