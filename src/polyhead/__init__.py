"""polyhead: every kind of multi-head attention as one system.

    import polyhead as ph

    out = ph.attention(q, k, v, mask=ph.Causal() & ph.Window(4096), softcap=50.0)
    print(ph.explain(q, k, v, mask=ph.Causal()))

Names that need more than torch (loading models, probing, planning) are imported when first used.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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
from polyhead.functional import Explanation, attention, explain
from polyhead.semantics import (
    ALiBi,
    Bias,
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
    draw,
    merge_states,
)

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
    from polyhead.generation import LanguageModel, SpeechToText, TextEncoder, TextToText, load
    from polyhead.inspection.ablation import ablate
    from polyhead.inspection.alignment import Alignment
    from polyhead.inspection.finding import find_heads
    from polyhead.inspection.probe import Probe, probe
    from polyhead.inspection.pruning import prune
    from polyhead.inspection.reading import SourceAlignment, align
    from polyhead.inspection.tables import compare_texts
    from polyhead.inspection.word_times import word_times
    from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention, RoPE, TransformerLayer
    from polyhead.models import Transformer
    from polyhead.planning import Plan, plan
    from polyhead.training import Trainable

try:
    __version__ = version("polyhead")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

_LAZY = {
    "Alignment": "polyhead.inspection.alignment",
    "DenseCache": "polyhead.caches",
    "LanguageModel": "polyhead.generation",
    "LatentCache": "polyhead.caches",
    "ModelCache": "polyhead.caches",
    "MultiHeadAttention": "polyhead.layers",
    "MultiHeadLatentAttention": "polyhead.layers",
    "PagedCache": "polyhead.caches",
    "Plan": "polyhead.planning",
    "Probe": "polyhead.inspection.probe",
    "QuantizedCache": "polyhead.caches",
    "RingCache": "polyhead.caches",
    "RoPE": "polyhead.layers",
    "SourceAlignment": "polyhead.inspection.reading",
    "SpeechToText": "polyhead.generation",
    "TextEncoder": "polyhead.generation",
    "TextToText": "polyhead.generation",
    "Trainable": "polyhead.training",
    "Transformer": "polyhead.models",
    "TransformerConfig": "polyhead.config",
    "TransformerLayer": "polyhead.layers",
    "ablate": "polyhead.inspection.ablation",
    "align": "polyhead.inspection.reading",
    "attach_adapter": "polyhead.checkpoints",
    "compare_texts": "polyhead.inspection.tables",
    "find_heads": "polyhead.inspection.finding",
    "load": "polyhead.generation",
    "plan": "polyhead.planning",
    "probe": "polyhead.inspection.probe",
    "prune": "polyhead.inspection.pruning",
    "word_times": "polyhead.inspection.word_times",
}

__all__ = [
    "ALiBi",
    "Alignment",
    "Bias",
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
    "compare_texts",
    "draw",
    "explain",
    "find_heads",
    "load",
    "merge_states",
    "plan",
    "probe",
    "prune",
    "word_times",
]


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("polyhead.integrations")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
