"""What a model costs before it exists: parameters, operations, cache bytes, what fits.

Read in this order: ``plan``, ``architecture``, ``weights``, ``flops``, ``memory``, ``layouts``.
"""

from polyhead.planning.architecture import Architecture, FeedForwardShape, LayerShape
from polyhead.planning.flops import Flops, tiled_pairs, visible_pairs
from polyhead.planning.layouts import cache_saving
from polyhead.planning.memory import Fit, LayerCache, layer_cache
from polyhead.planning.plan import Plan, plan
from polyhead.planning.presets import Preset, presets
from polyhead.planning.reading import read_architecture

__all__ = [
    "Architecture",
    "FeedForwardShape",
    "Fit",
    "Flops",
    "LayerCache",
    "LayerShape",
    "Plan",
    "Preset",
    "cache_saving",
    "layer_cache",
    "plan",
    "presets",
    "read_architecture",
    "tiled_pairs",
    "visible_pairs",
]
