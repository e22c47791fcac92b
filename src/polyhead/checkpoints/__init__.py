"""Real files in and out: GGUF, Hugging Face directories, and the models known by name.

checkpoint = load_checkpoint("smollm2")
ids = checkpoint.tokenizer.encode("The capital of France is")
logits = checkpoint.model(torch.tensor([ids]))
"""

from polyhead._utils.cache_directory import cache_directory
from polyhead.checkpoints.attached import Adapter, attach_adapter
from polyhead.checkpoints.cached_files import CachedFile, cached_files
from polyhead.checkpoints.catalogue import (
    Availability,
    KnownModel,
    ResolvedModel,
    available,
    find,
)
from polyhead.checkpoints.formats.parts import Progress
from polyhead.checkpoints.load import Checkpoint, load_checkpoint
from polyhead.checkpoints.predictor import load_predictor
from polyhead.checkpoints.row_adapters import RowAdapters
from polyhead.checkpoints.save import save_checkpoint
from polyhead.checkpoints.tokenizers.stream import StreamDecoder
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer

__all__ = [
    "Adapter",
    "Availability",
    "CachedFile",
    "Checkpoint",
    "KnownModel",
    "Progress",
    "ResolvedModel",
    "RowAdapters",
    "StreamDecoder",
    "Tokenizer",
    "attach_adapter",
    "available",
    "cache_directory",
    "cached_files",
    "find",
    "load_checkpoint",
    "load_predictor",
    "save_checkpoint",
]
