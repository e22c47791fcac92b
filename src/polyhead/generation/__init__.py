"""Text in, text out: sampling, streaming, and embeddings of texts."""

from polyhead.generation.batch import Generation
from polyhead.generation.encoder import TextEncoder
from polyhead.generation.language_model import LanguageModel
from polyhead.generation.loading import load
from polyhead.generation.options import GenerationOptions
from polyhead.generation.sampling import Sampler, Sampling
from polyhead.generation.stream import GenerationStats, TextStream

__all__ = [
    "Generation",
    "GenerationOptions",
    "GenerationStats",
    "LanguageModel",
    "Sampler",
    "Sampling",
    "TextEncoder",
    "TextStream",
    "load",
]
