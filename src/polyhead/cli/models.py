"""Loading a model for a verb, with a progress bar where it takes a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from polyhead.errors import UnsupportedError

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder
    from polyhead.generation.loading import Model

Expected = TypeVar("Expected")

_WORDS = {
    "LanguageModel": "is a decoder, which continues a text (polyhead generate)",
    "TextEncoder": "is an encoder, which reads text and does not write any (polyhead look)",
    "TextToText": "is an encoder-decoder, which turns a text into another (polyhead translate)",
    "SpeechToText": "is an encoder-decoder that reads sound (polyhead transcribe)",
}
_VERBS = {
    "LanguageModel": "this verb takes decoders",
    "TextToText": "this verb takes encoder-decoders that read text",
    "SpeechToText": "this verb takes models that read sound",
}


def load_expecting(name: str, dtype: str, kind: type[Expected]) -> Expected:
    """The model called ``name``, which must be of a kind.

    Raises:
        UnsupportedError: it is of another.
    """
    model = _load(name, dtype)
    if not isinstance(model, kind):
        raise UnsupportedError(f"{name} {_WORDS[type(model).__name__]}: {_VERBS[kind.__name__]}")
    return model


def load_any(name: str, dtype: str = "float32") -> LanguageModel | TextEncoder:
    """The model called ``name``, a decoder or an encoder.

    Raises:
        UnsupportedError: it is an encoder-decoder.
    """
    model = _load(name, dtype)
    from polyhead.generation import LanguageModel, TextEncoder

    if not isinstance(model, LanguageModel | TextEncoder):
        raise UnsupportedError(
            f"{name} {_WORDS[type(model).__name__]}: this verb takes decoders and encoders"
        )
    return model


def _load(name: str, dtype: str) -> Model:
    from polyhead.cli.terminal import progress

    with progress(f"loading {name}") as advance:
        # torch is imported here, which takes a second itself
        from polyhead.generation import load

        return load(name, dtype, progress=advance)
