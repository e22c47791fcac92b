"""Which modules ranks may divide: an allowlist of classes, as they were defined.

Where tokens are spread, a rank runs a module on some of the tokens; where heads, features or the
vocabulary are, on some of its weights. That is right for the modules that this package was written
for. Any other might mix tokens or features, and would compute something else without an error.
"""

from __future__ import annotations

from torch import nn

from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention, TransformerLayer
from polyhead.layers.differential_attention import DifferentialAttention
from polyhead.layers.exact import ExactType
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import XIELU, FeedForward
from polyhead.layers.gated_attention import GatedAttention
from polyhead.layers.lora import LoraLinear
from polyhead.layers.norms import HeadNorm, LayerNorm, RMSNorm
from polyhead.layers.off_by_one_attention import OffByOneAttention
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions
from polyhead.layers.scalable_softmax_attention import ScalableSoftmaxAttention
from polyhead.models import Transformer
from polyhead.models.embedding import Embedding
from polyhead.models.heads import Head, HeadTransform, TaskHead
from polyhead.models.stack import RelativeTable
from polyhead.parallel.ranks import unsupported

_BOTH: tuple[type[nn.Module], ...] = (
    Transformer, TransformerLayer, MultiHeadAttention, MultiHeadLatentAttention, FeedForward,
    Experts, XIELU, RMSNorm, HeadNorm, Embedding, LearnedPositions, SinusoidalPositions, Head,
    HeadTransform, RelativeTable, TaskHead, LayerNorm, nn.Linear, nn.Embedding, nn.LayerNorm,
    nn.Identity, nn.ModuleList,
)  # fmt: skip
_TOKENS: dict[type[nn.Module], ExactType[nn.Module]] = {
    kind: ExactType(kind)
    for kind in (
        *_BOTH, GatedAttention, DifferentialAttention, ScalableSoftmaxAttention,
        OffByOneAttention, LoraLinear,
    )
}  # fmt: skip
"""Modules whose output for a token depends on that token, its position and attention alone."""

_WEIGHTS: dict[type[nn.Module], ExactType[nn.Module]] = {kind: ExactType(kind) for kind in _BOTH}
"""Modules whose weights are divided, or used whole, as ``regions.py`` knows."""


def check_classes(model: nn.Module, dimension: str) -> None:
    """Raises unless ranks may divide every module of a model over a dimension.

    Args:
        model: A model, or a layer of one.
        dimension: ``"context"``, ``"tensor"`` or ``"expert"``; of the latter the experts count.

    Raises:
        UnsupportedError: Names the module and its class.
    """
    known = _TOKENS if dimension == "context" else _WEIGHTS
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, MultiHeadLatentAttention) and module.config.latent_heads > 1:
            raise unsupported(
                f"{kind.__name__} ({name or 'the module itself'}) with "
                f"latent_heads={module.config.latent_heads} on the dimension {dimension!r}"
            )
        if kind in known and known[kind].is_exact(module):
            continue
        what = f"a {kind.__name__} whose methods were replaced" if kind in known else kind.__name__
        raise unsupported(
            f"{what} ({name or 'the module itself'}) on the dimension {dimension!r}: ranks divide "
            "the modules of polyhead.layers and polyhead.models and torch's Linear, Embedding and "
            "LayerNorm; a class of another kind might need all tokens or weights at once"
        )
