"""Multi-token attention: scores are convolved over queries and keys, and weights mixed over heads.

    weights = mix(softmax(conv(scores)))        scores that are not seen are 0 in the convolution

Golovneva et al. 2025, "Multi-Token Attention", arXiv 2504.00927. A call that goes on with a text
attends with the last queries of the calls before, too, whose outputs it drops.

Shape letters: B batch, H query heads, T queries, D head size, n queries before.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import AttentionConfig, MultiTokenAttentionConfig
from polyhead.layers.causal_attention import CausalAttention
from polyhead.layers.causal_convolution import convolved_call
from polyhead.layers.handed import Handed
from polyhead.layers.recurrent import as_heads, with_tail
from polyhead.layers.registry import register_builder
from polyhead.semantics import DenseSource, KeyValueSource, MultiToken
from polyhead.semantics.arguments import AttentionOptions


class MultiTokenAttention(CausalAttention):
    """``CausalAttention`` by convolved scores; built from its configuration.

    Attributes:
        kernel: ``[H, queries, keys]``, at first the identity.
        mix: ``[H / m, m, m]`` of m neighbouring heads, at first the identity; None where m is 1.
    """

    config_class: ClassVar[type[AttentionConfig]] = MultiTokenAttentionConfig
    config: MultiTokenAttentionConfig
    called = "multi-token attention"
    kernel: nn.Parameter
    mix: nn.Parameter | None

    def _add_modules(self) -> None:
        config, m = self.config, self.config.mixed_heads
        self.kernel = nn.Parameter(torch.empty(config.num_heads, config.queries, config.keys))
        mix = nn.Parameter(torch.empty(config.num_heads // m, m, m)) if m > 1 else None
        self.register_parameter("mix", mix)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the kernel and what mixes heads to the identity. Projections and norms stay."""
        super().reset_parameters()
        with torch.no_grad():
            self.kernel.zero_()[:, 0, self.config.keys // 2] = 1.0
            if self.mix is not None:
                self.mix.copy_(torch.eye(self.config.mixed_heads))

    def _over(self, x: Tensor, real: Tensor | None, *more: Tensor, **call: Any) -> Tensor:
        positions = call.get("positions")
        if positions is None or not bool((positions < 0).any()):
            return super()._over(x, real, *more, **call)
        real = (positions >= 0).expand(x.shape[:2]) if real is None else real
        return self._packed(x, real, *more, **call)

    def _self_attention(
        self, x: Tensor, positions: Tensor | None, cache: Any, handed: Handed | None
    ) -> tuple[Tensor, KeyValueSource, None]:
        """As there, with the queries of earlier tokens in front."""
        at: int | Tensor = 0 if cache is None else cache.length
        q, k, v = self._project(x, at if positions is None else positions)
        rows = q.transpose(1, 2).flatten(2)
        with convolved_call(x, positions, cache) as call:
            source: KeyValueSource = DenseSource(k, v, positions)
            step = call if isinstance(call, Step) else None
            if step is not None:
                source = step.append("kv", k, v)
            rows = with_tail("queries", call.pack(rows), self.config.queries - 1, step)
        return as_heads(rows, self.num_heads), source, None

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        before = self.config.queries - 1
        mix: Tensor | None = None
        if self.mix is not None:
            mix = torch.block_diag(*self.mix)  # type: ignore[no-untyped-call]
        options["normalizer"] = MultiToken(self.kernel, mix)
        if (at := options.get("q_positions")) is not None:
            earlier = at[..., :1] + torch.arange(-before, 0, device=at.device)
            options["q_positions"] = torch.cat((earlier, at), dim=-1)
        return options

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        return heads[:, :, -x.shape[1] :]


register_builder(MultiTokenAttentionConfig, MultiTokenAttention.from_config)
