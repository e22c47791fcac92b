"""What is remembered: key/value caches behind one protocol."""

from polyhead.caches.dense import DenseCache
from polyhead.caches.model_cache import ModelCache
from polyhead.caches.protocol import KeyValueCache

__all__ = ["DenseCache", "KeyValueCache", "ModelCache"]
