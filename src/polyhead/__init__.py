"""polyhead: every kind of multi-head attention as one system.

    import polyhead as ph

    out = ph.attention(q, k, v, mask=ph.Causal() & ph.Window(4096), softcap=50.0)
    print(ph.explain(q, k, v, mask=ph.Causal()))

Names are imported when first used: ``import polyhead`` alone does not import torch.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.caches import (
        DenseCache,
        LatentCache,
        ModelCache,
        PagedCache,
        QuantizedCache,
        RingCache,
    )
    from polyhead.checkpoints import attach_adapter
    from polyhead.config import TransformerConfig
    from polyhead.conversion import convert, heal
    from polyhead.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        InputError,
        ModelNotFoundError,
        PolyheadError,
        SharedCacheError,
        UnsupportedError,
    )
    from polyhead.generation import LanguageModel, SpeechToText, TextEncoder, TextToText, load
    from polyhead.interpret.ablation import ablate
    from polyhead.interpret.alignment import Alignment
    from polyhead.interpret.finding import find_heads
    from polyhead.interpret.probe import Probe, probe
    from polyhead.interpret.pruning import prune
    from polyhead.interpret.reading import SourceAlignment, align
    from polyhead.interpret.tables import compare_texts
    from polyhead.interpret.word_times import word_times
    from polyhead.kernels.batch_invariant import batch_invariant
    from polyhead.kernels.dispatch import Explanation, attention, explain
    from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention, RoPE, TransformerLayer
    from polyhead.models import Transformer
    from polyhead.planning import Plan, plan
    from polyhead.semantics import (
        FIRE,
        ALiBi,
        Bias,
        BlockSparse,
        Causal,
        Chunk,
        DenseSource,
        Documents,
        Drop,
        Keep,
        KeyLengths,
        KeyValueSource,
        Mask,
        Prefix,
        RelativeBias,
        Window,
        draw_mask,
        merge_states,
    )
    from polyhead.training import Trainable
    from polyhead.training.evaluation import Perplexity, perplexity

    __version__: str

_HOMES = {
    "polyhead.caches": (
        "DenseCache",
        "LatentCache",
        "ModelCache",
        "PagedCache",
        "QuantizedCache",
        "RingCache",
    ),
    "polyhead.checkpoints": ("attach_adapter",),
    "polyhead.config": ("TransformerConfig",),
    "polyhead.conversion": ("convert", "heal"),
    "polyhead.errors": (
        "CheckpointError",
        "ConfigError",
        "ContextLengthError",
        "InputError",
        "ModelNotFoundError",
        "PolyheadError",
        "SharedCacheError",
        "UnsupportedError",
    ),
    "polyhead.training.evaluation": ("Perplexity", "perplexity"),
    "polyhead.kernels.dispatch": ("Explanation", "attention", "explain"),
    "polyhead.generation": ("LanguageModel", "SpeechToText", "TextEncoder", "TextToText", "load"),
    "polyhead.interpret.ablation": ("ablate",),
    "polyhead.interpret.alignment": ("Alignment",),
    "polyhead.interpret.finding": ("find_heads",),
    "polyhead.interpret.probe": ("Probe", "probe"),
    "polyhead.interpret.pruning": ("prune",),
    "polyhead.interpret.reading": ("SourceAlignment", "align"),
    "polyhead.interpret.tables": ("compare_texts",),
    "polyhead.interpret.word_times": ("word_times",),
    "polyhead.layers": (
        "MultiHeadAttention",
        "MultiHeadLatentAttention",
        "RoPE",
        "TransformerLayer",
    ),
    "polyhead.models": ("Transformer",),
    "polyhead.planning": ("Plan", "plan"),
    "polyhead.kernels.batch_invariant": ("batch_invariant",),
    "polyhead.semantics": (
        "ALiBi",
        "Bias",
        "BlockSparse",
        "Causal",
        "Chunk",
        "DenseSource",
        "Documents",
        "Drop",
        "FIRE",
        "Keep",
        "KeyLengths",
        "KeyValueSource",
        "Mask",
        "Prefix",
        "RelativeBias",
        "Window",
        "draw_mask",
        "merge_states",
    ),
    "polyhead.training": ("Trainable",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_RENAMED = {"draw": "draw_mask", "reproducible": "batch_invariant"}
"""Names of version 0.1, which work with a warning until the next one."""

__all__ = [
    "FIRE",
    "ALiBi",
    "Alignment",
    "Bias",
    "BlockSparse",
    "Causal",
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "DenseCache",
    "DenseSource",
    "Documents",
    "Drop",
    "Explanation",
    "InputError",
    "Keep",
    "KeyLengths",
    "KeyValueSource",
    "LanguageModel",
    "LatentCache",
    "Mask",
    "ModelCache",
    "ModelNotFoundError",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "PagedCache",
    "Perplexity",
    "Plan",
    "PolyheadError",
    "Prefix",
    "Probe",
    "QuantizedCache",
    "RelativeBias",
    "RingCache",
    "RoPE",
    "SharedCacheError",
    "SourceAlignment",
    "SpeechToText",
    "TextEncoder",
    "TextToText",
    "Trainable",
    "Transformer",
    "TransformerConfig",
    "TransformerLayer",
    "UnsupportedError",
    "Window",
    "ablate",
    "align",
    "attach_adapter",
    "attention",
    "batch_invariant",
    "compare_texts",
    "convert",
    "draw_mask",
    "explain",
    "find_heads",
    "heal",
    "load",
    "merge_states",
    "perplexity",
    "plan",
    "probe",
    "prune",
    "word_times",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(
            f"ph.{name} is named ph.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2
        )
        return __getattr__(_RENAMED[name])
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif not name.startswith("_") and find_spec(f"polyhead.{name}") is not None:
        return importlib.import_module(f"polyhead.{name}")
    else:
        raise AttributeError(f"module 'polyhead' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyhead")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"
