"""DeepSeek's files and this house's order: names of norms, and rows of the rotary parts.

The files keep the two features of a rotated pair side by side (0, 1), (2, 3), ...; here they stand
half a part away from each other (i, i + P/2). Queries and the shared key are permuted alike, so
their product is the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.config import LatentAttentionConfig

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
    return _converted(state, config, _OURS, interleaved=interleaved, to_ours=True)


def to_deepseek(
    state: Mapping[str, Tensor], config: LatentAttentionConfig, *, interleaved: bool = True
) -> dict[str, Tensor]:
    """The inverse of ``from_deepseek``."""
    return _converted(state, config, _THEIRS, interleaved=interleaved, to_ours=False)


def _converted(
    state: Mapping[str, Tensor],
    config: LatentAttentionConfig,
    names: Mapping[str, str],
    *,
    interleaved: bool,
    to_ours: bool,
) -> dict[str, Tensor]:
    converted = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if interleaved:
            tensor = reordered(tensor, module, config, to_ours=to_ours)
        converted[f"{names.get(module, module)}.{leaf}"] = tensor
    return converted


def reordered(
    tensor: Tensor, module: str, config: LatentAttentionConfig, *, to_ours: bool
) -> Tensor:
    """One tensor of a latent attention layer with its rotary rows in the other order.

    Args:
        tensor: A weight or a bias.
        module: Whose, by its name within the layer; those without rotary rows stay as they are, and
            so do misshapen tensors.
        config: Of the layer.
        to_ours: From interleaved rows to half-split ones, or back.
    """
    P, H, D = config.qk_rope_head_dim, config.num_heads, config.qk_head_dim
    pairs = torch.arange(P, device="cpu")
    order = (pairs.view(-1, 2) if to_ours else pairs.view(2, -1)).T.flatten()
    rows = tensor.shape[0] if tensor.ndim else 0
    if module in ("q_proj", "q_b_proj") and rows == H * D:
        heads = tensor.reshape(H, D, *tensor.shape[1:])
        return torch.cat((heads[:, :-P], heads[:, -P:][:, order]), dim=1).flatten(0, 1)
    if module == "kv_a_proj_with_mqa" and rows == config.latent_dim:
        return torch.cat((tensor[:-P], tensor[-P:][order]))
    return tensor
