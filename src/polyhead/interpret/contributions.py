"""What each head adds to the residual stream, and by that to a logit.

    head_h writes out_h W_O^h;     the layer writes Σ_h out_h W_O^h + bias

A norm between the head and the logits divides by the size of the whole stream. With that size held
as it was (Elhage et al. 2021, "direct logit attribution"), the logit is a sum over everything that
ever wrote to the stream, and a head's term is its share. It is what the head says directly, not
what later layers make of it.

Letters: B batch, H query heads, T tokens, V value size, E embed size.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import UnsupportedError
from polyhead.interpret.circuits import head_outputs, norm_weight
from polyhead.layers import TransformerLayer
from polyhead.layers.norms import RMSNorm
from polyhead.layers.record import AttentionRecord
from polyhead.layers.scope import Scope
from polyhead.models.parts import device_of, layer_of, projections_of, transformer_of


class Contributions:
    """One run of a model over a text, with every head's output kept.

    Args:
        model: A Transformer decoder, or what holds one.
        ids: ``[B, T]``.

    Raises:
        UnsupportedError: A post-norm model, whose stream is rescaled at every layer, several
            residual streams, or latent attention.
    """

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self._model = transformer_of(model)
        count = len(self._model.layers)
        layers = [layer_of(self._model, i) for i in range(count)]
        if not all(layer.config.only_adds for layer in layers):
            raise UnsupportedError(
                "contributions need pre-norm or sandwich layers: a post-norm layer, or one with a "
                "factor of the residual path, rescales the whole residual stream, several streams "
                "(AltUp) are mixed by every layer, and a shortcut joins behind another layer"
            )
        self._outputs: list[Tensor] = []
        self._inputs: dict[nn.Module, Tensor] = {}
        with ExitStack() as hooks:
            for layer in range(count):
                module = projections_of(self._model, layer)
                hooks.enter_context(module.register_attention_hook(self._keep))
            here = Scope()
            hooks.callback(here.close)
            for norm in self._norms():
                keep = here.only(self._keep_input)
                hooks.callback(norm.register_forward_pre_hook(keep).remove)
            with torch.inference_mode():
                self.logits = self._model(ids.to(device_of(self._model)))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        kept = [*self._outputs, *self._inputs.values(), self.logits]
        return sum(tensor.nbytes for tensor in kept)

    def residual(self, layer: int) -> Tensor:
        """``[B, H, T, E]`` what each head of a layer writes to the residual stream."""
        weight = head_outputs(projections_of(self._model, layer))
        written = torch.einsum("bhtv,hev->bhte", self._outputs[layer], weight)
        block = layer_of(self._model, layer)
        return self._through(_out_norm(block), written) * block.config.mix("attention")[1]

    def norms(self) -> Tensor:
        """``[layers, B, H, T]`` the length of what each head writes."""
        return torch.stack([self.residual(i).norm(dim=-1) for i in range(len(self._outputs))])

    def logit(self, token: int, position: int = -1) -> list[Tensor]:
        """Each head's contribution to one logit, ``[B, H]`` per layer.

        Args:
            token: The token whose logit it is (before a softcap).
            position: Which query's; −1 the last.

        Raises:
            UnsupportedError: The model has no logits, or transforms states before them.
        """
        layers = range(len(self._outputs))
        return [self._seen(self.residual(layer), token, None, position) for layer in layers]

    def _seen(self, part: Tensor, token: int, other: int | None, position: int) -> Tensor:
        """``[B, H]`` the shares of what was written, ``[B, H, T, E]``."""
        seen = self._through(self._model.final_norm, part)[:, :, position]
        return seen @ self._direction(token, other).to(seen)

    def _direction(self, token: int, other: int | None) -> Tensor:
        """``[E]`` along which the stream raises the logit, or the difference of two."""
        head = self._model.head
        if head is None:
            raise UnsupportedError("this model has no output head, so it has no logits")
        if len(head.transforms):
            raise UnsupportedError(
                "this model's logits are not linear in its stream: head_transforms stand between"
            )
        weight = self._model.unembedding.detach()
        return weight[token] if other is None else weight[token] - weight[other]

    def _through(self, norm: nn.Module | None, part: Tensor) -> Tensor:
        """A part ``[B, H, T, E]`` of a norm's input, as the norm scaled the whole."""
        if norm is None:
            return part
        x = self._inputs[norm].to(part.dtype)
        if isinstance(norm, RMSNorm):
            size = x.square().mean(dim=-1, keepdim=True)
        else:
            part = part - part.mean(dim=-1, keepdim=True)
            size = x.var(dim=-1, keepdim=True, correction=0)
        scaled = part * torch.rsqrt(size + norm.eps)[:, None]  # type: ignore[operator]
        gain = norm_weight(norm)
        return scaled if gain is None else scaled * gain.to(scaled)

    def _norms(self) -> list[nn.Module]:
        layers = (layer_of(self._model, i) for i in range(len(self._model.layers)))
        norms = [self._model.final_norm, *(_out_norm(layer) for layer in layers)]
        return [norm for norm in norms if norm is not None]

    def _keep(self, record: AttentionRecord) -> None:
        self._outputs.append(record.out.detach())

    def _keep_input(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inputs[norm] = inputs[0].detach()


def _out_norm(layer: TransformerLayer) -> nn.Module | None:
    """The norm that a sandwich layer puts behind its attention."""
    return layer._modules["attention_out_norm"]
