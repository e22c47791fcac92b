"""Key/value caches behind one protocol.

A cache is a storage (plain, latent, quantized) in a layout (dense, ring, paged); see ``sizes`` for
both as data, and ``StoredCache`` for any pair.
"""

from polyhead.caches.dense import DenseCache
from polyhead.caches.evicting import EvictingCache
from polyhead.caches.eviction import H2O, Evicting, SnapKV, StreamingLLM
from polyhead.caches.kinds import LatentCache, PagedCache, QuantizedCache, RingCache
from polyhead.caches.layer_cache import LayerCache, Step
from polyhead.caches.model_cache import ModelCache
from polyhead.caches.protocol import KeyValueCache, SequenceCache
from polyhead.caches.sizes import (
    Dense,
    Latent,
    Layout,
    Paged,
    Plain,
    Quantized,
    Ring,
    Storage,
    cache_bytes,
)
from polyhead.caches.stored import StoredCache

__all__ = [
    "H2O",
    "Dense",
    "DenseCache",
    "Evicting",
    "EvictingCache",
    "KeyValueCache",
    "Latent",
    "LatentCache",
    "LayerCache",
    "Layout",
    "ModelCache",
    "Paged",
    "PagedCache",
    "Plain",
    "Quantized",
    "QuantizedCache",
    "Ring",
    "RingCache",
    "SequenceCache",
    "SnapKV",
    "Step",
    "Storage",
    "StoredCache",
    "StreamingLLM",
    "cache_bytes",
]
