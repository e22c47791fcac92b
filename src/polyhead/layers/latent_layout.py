"""DeepSeek's files and this house's order: names of norms, and rows of the rotary parts.

The files keep the two features of a rotated pair side by side (0, 1), (2, 3), ...; here they stand
half a part away from each other (i, i + P/2). Queries and the shared key are permuted alike, so
their product is the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.layers.latent_config import LatentAttentionConfig

_THEIRS = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}
_OURS = {theirs: ours for ours, theirs in _THEIRS.items()}


def from_deepseek(
    state: Mapping[str, Tensor], config: LatentAttentionConfig, *, interleaved: bool = True
) -> dict[str, Tensor]:
    """The state dict of a DeepSeek attention layer as one of ``MultiHeadLatentAttention``.

    Args:
        state: Tensors by DeepSeek's names within the layer (``q_b_proj.weight``, ...).
        config: Of the layer.
        interleaved: Whether the file's rotary rows are interleaved (``rope_interleave``).
    """
    return _converted(state, config, _OURS, _order(config, to_ours=True) if interleaved else None)


def to_deepseek(
    state: Mapping[str, Tensor], config: LatentAttentionConfig, *, interleaved: bool = True
) -> dict[str, Tensor]:
    """The inverse of ``from_deepseek``."""
    return _converted(
        state, config, _THEIRS, _order(config, to_ours=False) if interleaved else None
    )


def _converted(
    state: Mapping[str, Tensor],
    config: LatentAttentionConfig,
    names: Mapping[str, str],
    order: Tensor | None,
) -> dict[str, Tensor]:
    P = config.qk_rope_head_dim
    converted = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if order is not None and module in ("q_proj", "q_b_proj"):
            heads = tensor.view(config.num_heads, config.qk_head_dim, *tensor.shape[1:])
            tensor = torch.cat((heads[:, :-P], heads[:, -P:][:, order]), dim=1).flatten(0, 1)
        elif order is not None and module == "kv_a_proj_with_mqa":
            tensor = torch.cat((tensor[:-P], tensor[-P:][order]))
        converted[f"{names.get(module, module)}.{leaf}"] = tensor
    return converted


def _order(config: LatentAttentionConfig, *, to_ours: bool) -> Tensor:
    """Which of the rotary rows of one order comes at each place of the other, ``[P]``."""
    pairs = torch.arange(config.qk_rope_head_dim, device="cpu")
    if to_ours:
        return pairs.view(-1, 2).T.flatten()
    return pairs.view(2, -1).T.flatten()
