"""The cost of a model before it is built: parameters, operations, cache bytes, what fits.

Read in this order: ``planner``, ``weights``, ``flops``, ``memory``, ``layouts``.
"""

from polyhead.planning.flops import Flops, tiled_pairs, visible_pairs
from polyhead.planning.layouts import cache_saving
from polyhead.planning.memory import Fit, LayerCache, layer_cache
from polyhead.planning.planner import Plan, plan
from polyhead.planning.presets import Preset, presets, read_config

__all__ = [
    "Fit",
    "Flops",
    "LayerCache",
    "Plan",
    "Preset",
    "cache_saving",
    "layer_cache",
    "plan",
    "presets",
    "read_config",
    "tiled_pairs",
    "visible_pairs",
]
