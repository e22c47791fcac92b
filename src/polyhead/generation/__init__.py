"""Text in, text out: search, sampling, streaming, translation, and embeddings of texts."""

from polyhead.generation.batch import Generation
from polyhead.generation.conversation import Conversation
from polyhead.generation.encoder import TextEncoder
from polyhead.generation.language_model import LanguageModel
from polyhead.generation.loading import load
from polyhead.generation.options import GenerationOptions
from polyhead.generation.sampling import Sampler, Sampling
from polyhead.generation.speech_to_text import SpeechToText
from polyhead.generation.stream import GenerationStats, TextStream
from polyhead.generation.tasks import Filled, Label, Span
from polyhead.generation.text_to_text import TextToText

__all__ = [
    "Conversation",
    "Filled",
    "Generation",
    "GenerationOptions",
    "GenerationStats",
    "Label",
    "LanguageModel",
    "Sampler",
    "Sampling",
    "Span",
    "SpeechToText",
    "TextEncoder",
    "TextStream",
    "TextToText",
    "load",
]
