"""Attention whose queries and keys are convolved along time, and whose values are of two tokens.

    [q' | k'] = conv2(conv1([q | k]))       q = x Wq, k = x Wk; features first, then heads
    m_h = (q_h + k_g) / 2                   of head h, which reads kv head g; m_g is their mean
    q_h = rope(norm(q'_h + m_h))            k_g = s_g · rope(norm(k'_g + m_g))
    v_t = concat(x_t Wv, x_(t−1) Wv')       then cut into heads

CCA: Figliolia et al. 2025, "Compressed convolutional attention: efficient attention in a compressed
latent space" (arXiv 2510.04476); ZAYA1 (Zyphra 2025, arXiv 2511.17127). Convolutions are causal,
the first of each feature, the second of all features of a head. Before a sequence stand zeros, of
which the projection of values makes its bias.

Shape letters: B batch, H query heads, G kv heads, R = H / G, T tokens, D head size, V value size,
n tokens of the second kernel, W = (H + G) · D, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import AttentionConfig, ConvolutionalAttentionConfig
from polyhead.layers import fused
from polyhead.layers.causal_attention import CausalAttention
from polyhead.layers.recurrent import convolve, with_tail
from polyhead.layers.registry import register_builder
from polyhead.semantics import DenseSource, KeyValueSource, Mask


class ConvolutionalAttention(CausalAttention):
    """``CausalAttention`` with convolved queries and keys; built from its configuration.

    Attributes:
        v_proj: Its first rows make values of a token, its last ones those of the next.
        depthwise: ``[W, 1, n']`` and a bias, the first convolution.
        per_head: ``[W, D, n]`` and a bias, the second.
        key_scale: ``[G]`` s, at first 1.
    """

    config_class: ClassVar[type[AttentionConfig]] = ConvolutionalAttentionConfig
    config: ConvolutionalAttentionConfig
    called = "convolutional attention"

    def _add_modules(self) -> None:
        config, W = self.config, self.config.convolved
        heads = self.num_heads + self.num_kv_heads
        self.depthwise = nn.Conv1d(W, W, config.depthwise_kernel, groups=W)
        self.per_head = nn.Conv1d(W, W, config.head_kernel, groups=heads)
        self.key_scale = nn.Parameter(torch.ones(self.num_kv_heads))

    def reset_parameters(self) -> None:
        """Sets sinks to 0 and the keys' factors to 1. Projections, kernels and norms stay."""
        super().reset_parameters()
        nn.init.ones_(self.key_scale)

    def _over(self, x: Tensor, real: Tensor | None, *more: Tensor, **call: Any) -> Tensor:
        positions = call.get("positions")
        if real is None or positions is None:  # padding behind a text changes nothing in it
            return super()._over(x, real, *more, **call)
        return self._packed(x, real, *more, **call)

    def _self_attention(
        self, x: Tensor, positions: Tensor | None, cache: Any, handed: Any
    ) -> tuple[Tensor, KeyValueSource, Mask | None]:
        if cache is None:
            q, k, v = self._made(x, 0 if positions is None else positions, None)
            return q, DenseSource(k, v, positions), None
        at = cache.length if positions is None else positions
        with cache.step(x, positions) as step:
            q, k, v = self._made(x, at, step)
            return q, step.append("kv", k, v), None

    def _made(
        self, x: Tensor, at: int | Tensor, step: Step | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, H, T, D]``, k ``[B, G, T, D]`` and v ``[B, G, T, V]``, as ``_project``."""
        if step is None:
            q, k, v = self._mixed(x, None)
        else:
            q, k, v = map(step.unpack, self._mixed(step.pack(x), step))
        k = self._placed(k, self.num_kv_heads, "k_norm", at) * self.key_scale[:, None, None]
        return self._queries(q, at), k, self._values(v)

    def _mixed(self, x: Tensor, step: Step | None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, T, H · D]``, k ``[B, T, G · D]`` and v ``[B, T, G · V]`` of packed tokens."""
        (B, T, _), G, D = x.shape, self.num_kv_heads, self.head_dim
        q, k, v = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
        convolved = self._convolved(q, k, step)
        mean = (q.view(B, T, G, -1, D) + k.view(B, T, G, 1, D)) * 0.5
        q = convolved[..., : q.shape[-1]] + mean.flatten(2)
        k = convolved[..., q.shape[-1] :] + mean.mean(dim=-2).flatten(2)
        return q, k, self._with_delayed(v, step)

    def _convolved(self, q: Tensor, k: Tensor, step: Step | None) -> Tensor:
        """``[B, T, W]`` both convolutions of packed queries and keys as they are projected."""
        (B, T, _), D, n = q.shape, self.head_dim, self.config.head_kernel
        inputs = torch.cat((q, k), dim=-1)
        inputs = with_tail("convolved", inputs, self.config.earlier_tokens, step)
        mixed = convolve(inputs, self.depthwise.weight[:, 0], self.depthwise.bias)
        del inputs
        # The n tokens that each sees, side by side: [H + G, B · T, D · n].
        near = mixed.view(B, T + n - 1, -1, D).unfold(1, n, 1).permute(2, 0, 1, 3, 4)
        weight = self.per_head.weight.view(-1, D, D * n)
        made = near.reshape(len(weight), B * T, D * n) @ weight.mT
        bias = self.per_head.bias
        assert bias is not None  # ``_add_modules`` makes one
        return made.transpose(0, 1).reshape(B, T, -1) + bias

    def _with_delayed(self, v: Tensor, step: Step | None) -> Tensor:
        """``[B, T, G · V]`` packed values, whose last half is of the token before."""
        own, late = v.chunk(2, dim=-1)
        late = with_tail("delayed", late, 1, step)[:, :-1]
        if (bias := self.v_proj.bias) is not None:
            before = [0] * len(v) if step is None else step.before
            begins = torch.tensor([not n for n in before], device=v.device)[:, None]
            first = torch.where(begins, bias[own.shape[-1] :].to(v.dtype), late[:, 0])
            late = torch.cat((first[:, None], late[:, 1:]), dim=1)
        return torch.cat((own, late), dim=-1)


register_builder(ConvolutionalAttentionConfig, ConvolutionalAttention.from_config)
