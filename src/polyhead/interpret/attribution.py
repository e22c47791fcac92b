"""Who wrote a logit: the embedding, each head, each network, each neuron.

A pre-norm model's stream is a sum, and with the scale of the last norm as it was (Elhage et al.
2021) a logit is linear in it. So the shares of all writers add up to the logit:

    logit(a) − logit(b) = embedding + Σ heads + Σ biases of attention + Σ networks + norm's bias

Letters: B batch, H query heads, T tokens, E embed size, F hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.errors import UnsupportedError
from polyhead.interpret.activations.tracing import trace
from polyhead.interpret.contributions import Contributions
from polyhead.interpret.effects import Effects
from polyhead.layers.feed_forward import FeedForward
from polyhead.models.parts import layer_of, transformer_of


class LogitAttribution(Contributions):
    """One run of a model over a text, with all that wrote to the stream.

    Args:
        model: A Transformer decoder, or what holds one.
        ids: ``[B, T]``.

    Raises:
        UnsupportedError: A layer whose stream is no sum of attention and network.
    """

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        transformer = transformer_of(model)
        for number, layer in enumerate(transformer.config.layers):
            if layer.per_layer_input is not None or layer.output_scale or layer.crossing:
                raise UnsupportedError(
                    f"layer {number} writes more than attention and network to the stream, or "
                    "scales it: shares would not add up"
                )
        with trace(model) as t:
            known = set(t.names())
            writers = {"embedding": t.layers[0].resid_pre.save()}
            for number in range(len(t.layers)):
                for part in ("attention", "mlp"):
                    for name in (f"layers.{number}.{part}.out", f"layers.{number}.{part}.hidden"):
                        if name in known:
                            writers[name] = t[name].save()
            super().__init__(model, ids)
        self._written = {name: saved.value for name, saved in writers.items()}

    def parts(self, token: int, other: int | None = None, position: int = -1) -> Effects:
        """Each writer's share of a logit, or of the difference of two, of the first text.

        Args:
            token: The token whose logit it is, before a bias, scale and softcap of logits.
            other: The token whose logit is taken from it; None: none.
            position: Which query's; −1 the last.

        Returns:
            By ``writer``: ``"embedding"``, ``"3.1"`` (a head), ``"3 bias"`` (of attention),
            ``"3 mlp"``, ``"norm bias"``; they add up to the logit.
        """
        found: dict[str, Tensor] = {"embedding": self._share("embedding", token, other, position)}
        for number in range(len(self._outputs)):
            heads = self._seen(self.residual(number), token, other, position)[0]
            whole = self._share(f"layers.{number}.attention.out", token, other, position)
            found |= {f"{number}.{head}": share for head, share in enumerate(heads)}
            found[f"{number} bias"] = whole - heads.sum()
            if (name := f"layers.{number}.mlp.out") in self._written:
                found[f"{number} mlp"] = self._share(name, token, other, position)
        bias = getattr(self._model.final_norm, "bias", None)
        if bias is not None:
            found["norm bias"] = bias.detach() @ self._direction(token, other).to(bias)
        return Effects(torch.stack([*found.values()]), {"writer": tuple(found)})

    def neurons(
        self, layer: int, token: int, other: int | None = None, position: int = -1
    ) -> Effects:
        """Each hidden feature's share through a layer's network, of the first text.

        Args:
            layer: Index of the layer, from 0.
            token: As in ``parts``.
            other: As in ``parts``.
            position: As in ``parts``.

        Returns:
            By ``neuron``; with the share of the projection's bias they add up to ``"3 mlp"``.

        Raises:
            UnsupportedError: The layer's network is a mixture, or has a norm behind its features.
        """
        block = layer_of(self._model, layer)
        network = block.feed_forward
        if type(network) is not FeedForward:
            raise UnsupportedError(
                f"layer {layer} has a {type(network).__name__}: neurons are those of a FeedForward"
            )
        hidden = self._written[f"layers.{layer}.mlp.hidden"][:1]
        weight = network.down_proj.weight.detach()
        scale = block.config.mix("feed_forward")[1] * network.config.out_scale
        at = position % hidden.shape[1]
        written = hidden[0, at].to(weight)[:, None] * weight.mT * scale  # [F, E]
        out_norm = block._modules["feed_forward_out_norm"]
        written = self._at(out_norm, written, at)
        seen = self._at(self._model.final_norm, written, at)
        shares = seen @ self._direction(token, other).to(seen)
        return Effects(shares, {"neuron": tuple(range(len(shares)))})

    def _at(self, norm: nn.Module | None, parts: Tensor, at: int) -> Tensor:
        """Parts ``[F, E]`` of one token through a norm as it scaled the whole."""
        if norm is None:
            return parts
        held = self._inputs[norm]
        self._inputs[norm] = held[:1, at : at + 1]
        try:
            return self._through(norm, parts[None, :, None])[0, :, 0]
        finally:
            self._inputs[norm] = held

    def _share(self, name: str, token: int, other: int | None, position: int) -> Tensor:
        return self._seen(self._written[name][:, None], token, other, position)[0, 0]

    def _norms(self) -> list[nn.Module]:
        behind = [
            layer_of(self._model, i)._modules.get("feed_forward_out_norm")
            for i in range(len(self._model.layers))
        ]
        return super()._norms() + [norm for norm in behind if norm is not None]
