"""Models in plain torch, whose training steps are compared with polyhead's.

Both take their weights from a polyhead model, so that they compute what it computes.

Shape letters: B batch, H query heads, G kv heads, T tokens, D head size, E embed size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.models import Transformer


class PlainDecoder(nn.Module):
    """Llama's decoder around ``scaled_dot_product_attention``; its parameters are named as ours."""

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        config, layer = ours.config, ours.config.layers[0]
        attention: Any = layer.attention
        network: Any = layer.feed_forward
        E, F_, D = config.embed_dim, network.hidden_dim, attention.head_dim
        self.head_dim, heads = D, attention.num_heads * D
        kv_heads = attention.num_kv_heads * D

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(E, eps=layer.norm.eps)

        self.embedding = nn.ModuleDict({"tokens": nn.Embedding(config.vocab_size, E)})
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.ModuleDict(
                        {
                            "q_proj": linear(E, heads),
                            "k_proj": linear(E, kv_heads),
                            "v_proj": linear(E, kv_heads),
                            "o_proj": linear(heads, E),
                        }
                    ),
                    "feed_forward": nn.ModuleDict(
                        {
                            "gate_proj": linear(E, F_),
                            "up_proj": linear(E, F_),
                            "down_proj": linear(F_, E),
                        }
                    ),
                    "attention_norm": norm(),
                    "feed_forward_norm": norm(),
                }
            )
            for _ in config.layers
        )
        self.final_norm = norm()
        angles = torch.outer(
            torch.arange(config.max_positions).float(),
            attention.rope.theta ** (-torch.arange(0, D, 2).float() / D),
        )
        self.cos, self.sin = (
            x(torch.cat((angles, angles), dim=-1)) for x in (torch.cos, torch.sin)
        )
        self.load_state_dict(ours.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary]`` of ids ``[B, T]``."""
        tokens: Any = self.embedding["tokens"]
        layers: Any = self.layers
        x: Tensor = tokens(ids)
        for layer in layers:
            x = x + self._attend(layer["attention"], layer["attention_norm"](x))
            f, h = layer["feed_forward"], layer["feed_forward_norm"](x)
            x = x + f["down_proj"](F.silu(f["gate_proj"](h)) * f["up_proj"](h))
        return F.linear(self.final_norm(x), tokens.weight)

    def _attend(self, attention: Any, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            attention[name](x).view(B, T, -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = self._rotated(q), self._rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        joined: Tensor = attention["o_proj"](out.transpose(1, 2).reshape(B, T, -1))
        return joined

    def _rotated(self, x: Tensor) -> Tensor:
        T, half = x.shape[2], self.head_dim // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[:T].to(x.dtype) + turned * self.sin[:T].to(x.dtype)

    def loss(self, ids: Tensor) -> Tensor:
        """Cross-entropy of the next tokens."""
        logits = self(ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class TorchTransformer(nn.Module):
    """``nn.Transformer`` with sinusoids and one embedding, as Vaswani et al. 2017."""

    def __init__(self, ours: Transformer, dropout: float) -> None:
        super().__init__()
        config = ours.config
        E, layer = config.embed_dim, config.layers[0]
        attention: Any = layer.attention
        network: Any = layer.feed_forward
        self.embedding, self.bias = nn.Embedding(config.vocab_size, E), nn.Parameter(torch.empty(0))
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Transformer(
            E, attention.num_heads, len(config.encoder_layers), len(config.layers),
            network.hidden_dim, dropout, batch_first=True,
        )  # fmt: skip
        self.body.encoder.norm = self.body.decoder.norm = None  # the paper has no final norms
        angles = torch.outer(
            torch.arange(config.max_positions).float(),
            torch.exp(torch.arange(0, E, 2).float() * (-math.log(10_000.0) / E)),
        )
        self.places = torch.cat((angles.sin(), angles.cos()), dim=-1)
        self._take(ours)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary]`` of the tokens after those of the target."""
        seen = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        read, written = self._embedded(source), self._embedded(target)
        hidden = self.body(read, written, tgt_mask=seen, tgt_is_causal=True)
        return F.linear(hidden, self.embedding.weight, self.bias)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(x + self.places[: ids.shape[1]])
        return embedded

    def loss(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the labels."""
        logits = self(source, target)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _take(self, ours: Transformer) -> None:
        table = {name: x.detach() for name, x in ours.named_parameters()}
        found = {"embedding.weight": table["embedding.tokens.weight"], "bias": table["head.bias"]}
        self.bias = nn.Parameter(torch.empty_like(table["head.bias"]))
        for side, theirs in (("encoder_layers", "encoder"), ("layers", "decoder")):
            for i in range(len(getattr(ours, side))):
                found |= _layer_of(table, f"{side}.{i}", f"body.{theirs}.layers.{i}")
        self.load_state_dict(found)


def _layer_of(ours: dict[str, Tensor], layer: str, theirs: str) -> dict[str, Tensor]:
    """The weights of a layer under torch's names."""
    found: dict[str, Tensor] = {}
    has_cross = f"{layer}.cross_attention.q_proj.weight" in ours
    parts = {"attention": "self_attn"} | (
        {"cross_attention": "multihead_attn"} if has_cross else {}
    )
    names = {f"{part}.o_proj": f"{name}.out_proj" for part, name in parts.items()}
    names |= {"feed_forward.up_proj": "linear1", "feed_forward.down_proj": "linear2"}
    norms = ["attention_norm", *["cross_attention_norm"] * has_cross, "feed_forward_norm"]
    names |= {norm: f"norm{i + 1}" for i, norm in enumerate(norms)}
    for kind in ("weight", "bias"):
        for mine, name in names.items():
            found[f"{theirs}.{name}.{kind}"] = ours[f"{layer}.{mine}.{kind}"]
        for part, name in parts.items():
            rows = [ours[f"{layer}.{part}.{x}_proj.{kind}"] for x in "qkv"]
            found[f"{theirs}.{name}.in_proj_{kind}"] = torch.cat(rows)
    return found
