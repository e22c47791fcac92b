"""Text in, text out: search, sampling, streaming, translation, and embeddings of texts."""

from polyhead.generation.decoding.batch import Generation
from polyhead.generation.decoding.logprobs import TokenLogprobs
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.sampling import Sampler, Sampling
from polyhead.generation.decoding.stream import GenerationStats, TextStream
from polyhead.generation.pipelines.conversation import Conversation
from polyhead.generation.pipelines.language_model import LanguageModel
from polyhead.generation.pipelines.loading import load
from polyhead.generation.pipelines.multi_vector_encoder import MultiVectorEncoder
from polyhead.generation.pipelines.ranking import Ranked
from polyhead.generation.pipelines.speech_to_text import SpeechToText
from polyhead.generation.pipelines.tasks import Filled, Label, Span
from polyhead.generation.pipelines.text_encoder import TextEncoder
from polyhead.generation.pipelines.text_sampler import TextChunk, TextSampler
from polyhead.generation.pipelines.text_to_text import TextToText

__all__ = [
    "Conversation",
    "Filled",
    "Generation",
    "GenerationOptions",
    "GenerationStats",
    "Label",
    "LanguageModel",
    "MultiVectorEncoder",
    "Ranked",
    "Sampler",
    "Sampling",
    "Span",
    "SpeechToText",
    "TextChunk",
    "TextEncoder",
    "TextSampler",
    "TextStream",
    "TextToText",
    "TokenLogprobs",
    "load",
]
