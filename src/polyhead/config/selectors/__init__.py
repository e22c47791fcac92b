"""How the heads of ``SelectiveAttentionConfig`` choose keys, as plain data, a kind in each file."""

from polyhead.config.selectors.base import SelectorConfig
from polyhead.config.selectors.block_bounds import BlockBoundsConfig
from polyhead.config.selectors.block_indexer import BlockIndexerConfig
from polyhead.config.selectors.block_means import BlockMeansConfig
from polyhead.config.selectors.mean_indexer import MeanIndexerConfig

__all__ = [
    "BlockBoundsConfig",
    "BlockIndexerConfig",
    "BlockMeansConfig",
    "MeanIndexerConfig",
    "SelectorConfig",
]
