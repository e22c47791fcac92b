"""FIRE: a learned bias that interpolates between distances (Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.semantics.biases import Bias
from polyhead.semantics.tokens import Tokens, distance

_EPS = 1e-6


class FIRE(
    Bias,
    arguments={
        "hidden_weight": Tensor,
        "hidden_bias": Tensor,
        "output_weight": Tensor,
        "output_bias": Tensor,
        "c": Tensor,
        "threshold": Tensor,
    },
):
    """Functional interpolation for relative positions (Li et al. 2023, eq. 4 and 5).

        x_ij = ψ(i − j) / ψ(max(i, |threshold|))        ψ(x) = log(1 + |c x|)
        hidden_wij = relu(hidden_weight_w · x_ij + hidden_bias_w)
        bias_hij = Σ_w output_weight_hw · hidden_wij + output_bias_h

    i and j are positions of the query and the key. Distances are measured against the query's own
    position, so that a longer sequence asks for nothing that a shorter one has not.

    Args:
        hidden_weight: ``[width, 1]`` of the first linear layer.
        hidden_bias: ``[width]``.
        output_weight: ``[H, width]`` of the second.
        output_bias: ``[H]``.
        c: ``[]``, how fast the logarithm grows; 0.1 to begin with.
        threshold: ``[]``, positions below it are not told apart by their sequence's length; 512 to
            begin with.

    Raises:
        ValueError: Tensors of other shapes, or that are not floating point.
    """

    def __init__(
        self,
        hidden_weight: Tensor,
        hidden_bias: Tensor,
        output_weight: Tensor,
        output_bias: Tensor,
        c: Tensor,
        threshold: Tensor,
    ) -> None:
        self.hidden_weight, self.hidden_bias = hidden_weight, hidden_bias
        self.output_weight, self.output_bias = output_weight, output_bias
        self.c, self.threshold = c, threshold
        width, heads = hidden_bias.numel(), output_bias.numel()
        wanted = ((width, 1), (width,), (heads, width), (heads,), (), ())
        for name, tensor, shape in zip(self._names(), self.tensors, wanted, strict=True):
            if tensor.shape != shape or not tensor.is_floating_point():
                raise ValueError(
                    f"FIRE {name} must be floating point of shape {list(shape)}: got "
                    f"{tensor.dtype} of shape {list(tensor.shape)}"
                )

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(FIRE.arguments or ())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._names())

    def with_tensors(self, tensors: Sequence[Tensor]) -> FIRE:
        return FIRE(*tensors)

    def of_heads(self, heads: Sequence[int]) -> FIRE:
        chosen = list(heads)
        of_output = self.output_weight[chosen], self.output_bias[chosen]
        return FIRE(self.hidden_weight, self.hidden_bias, *of_output, self.c, self.threshold)

    def tile(self, q: Tokens, k: Tokens, like: Tensor) -> Tensor:
        hidden, hidden_bias, output, output_bias, c, threshold = (x.to(like) for x in self.tensors)
        positions = q.position_tensor(like.device).to(like)
        longest = torch.maximum(positions, threshold.abs())[..., :, None]
        apart = distance(q, k, like.device)[:, 0].to(like)
        x = torch.log1p((c * apart).abs()) / (torch.log1p((c * longest).abs()) + _EPS)
        # [1 or B, T, S, width] is the largest tensor here: as many as there are heads, or so.
        features = torch.relu(x[..., None] * hidden[:, 0] + hidden_bias)
        return (features @ output.mT + output_bias).permute(0, 3, 1, 2)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if len(self.output_bias) != heads:
            raise ValueError(
                f"FIRE output_bias must be [H] = [{heads}]: got {list(self.output_bias.shape)}"
            )

    def __repr__(self) -> str:
        return f"FIRE([{len(self.output_bias)}], width={len(self.hidden_bias)})"
