"""What attention means: masks, biases, the specification, key/value sources, the reference.

Read in this order: ``tokens``, ``masks``, ``biases``, ``sources``, ``call``, ``scores``,
``normalizers``, ``reference``, ``state``, ``weights``.
"""

from polyhead.semantics.biases import (
    ALiBi,
    Bias,
    RelativeBias,
    RoundedALiBi,
    TensorBias,
    alibi_slopes,
)
from polyhead.semantics.call import Call, Specification
from polyhead.semantics.content_bias import RelativeContentBias
from polyhead.semantics.drawing import draw_mask
from polyhead.semantics.fire import FIRE
from polyhead.semantics.index_scores import index_scores
from polyhead.semantics.masks import (
    BlockSparse,
    Causal,
    Chosen,
    Chunk,
    Documents,
    Drop,
    Keep,
    KeyLengths,
    Mask,
    Prefix,
    Visibility,
    Window,
)
from polyhead.semantics.normalizers import (
    CoPE,
    Entmax,
    MultiToken,
    Normalizer,
    Sigmoid,
    Softpick,
    StickBreaking,
    TalkingHeads,
)
from polyhead.semantics.soft_prompt_bias import SoftPromptBias
from polyhead.semantics.sources import DenseSource, KeyValueSource
from polyhead.semantics.state import State, add_sinks, merge_states
from polyhead.semantics.tokens import Span, Tokens

__all__ = [
    "FIRE",
    "ALiBi",
    "Bias",
    "BlockSparse",
    "Call",
    "Causal",
    "Chosen",
    "Chunk",
    "CoPE",
    "DenseSource",
    "Documents",
    "Drop",
    "Entmax",
    "Keep",
    "KeyLengths",
    "KeyValueSource",
    "Mask",
    "MultiToken",
    "Normalizer",
    "Prefix",
    "RelativeBias",
    "RelativeContentBias",
    "RoundedALiBi",
    "Sigmoid",
    "SoftPromptBias",
    "Softpick",
    "Span",
    "Specification",
    "State",
    "StickBreaking",
    "TalkingHeads",
    "TensorBias",
    "Tokens",
    "Visibility",
    "Window",
    "add_sinks",
    "alibi_slopes",
    "draw_mask",
    "index_scores",
    "merge_states",
]
