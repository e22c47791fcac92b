"""How heads choose blocks of keys, a kind in each file (``polyhead.config.selectors``)."""

from polyhead.layers.selectors.base import BlockSelector, Choice, build_selector
from polyhead.layers.selectors.block_bounds import BlockBounds, bounds
from polyhead.layers.selectors.block_indexer import BlockIndexer
from polyhead.layers.selectors.block_means import BlockMeans
from polyhead.layers.selectors.mean_indexer import MeanIndexer

__all__ = [
    "BlockBounds",
    "BlockIndexer",
    "BlockMeans",
    "BlockSelector",
    "Choice",
    "MeanIndexer",
    "bounds",
    "build_selector",
]
