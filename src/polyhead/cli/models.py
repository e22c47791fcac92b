"""Loading a model for a verb, with a progress bar where it takes a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from polyhead.errors import UnsupportedError

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder, TextToText
    from polyhead.generation.pipelines.loading import Model

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


def load_expecting(
    name: str,
    dtype: str | None,
    kind: type[Expected],
    device: str = "cpu",
    activations: str | None = None,
) -> Expected:
    """The model called ``name``, which must be of a kind.

    Raises:
        UnsupportedError: it is of another.
    """
    model = _load(name, dtype, device, activations)
    if not isinstance(model, kind):
        raise UnsupportedError(f"{name} {_WORDS[type(model).__name__]}: {_VERBS[kind.__name__]}")
    return model


def load_reader(name: str, dtype: str = "float32") -> LanguageModel | TextEncoder:
    """The model called ``name``, a decoder or an encoder.

    Raises:
        UnsupportedError: it is an encoder-decoder.
    """
    model = load_any(name, dtype)
    from polyhead.generation import TextToText

    if isinstance(model, TextToText):
        raise UnsupportedError(
            f"{name} {_WORDS['TextToText']}: this verb takes decoders and encoders"
        )
    return model


def load_any(name: str, dtype: str = "float32") -> LanguageModel | TextEncoder | TextToText:
    """The model called ``name``, of any kind that reads text.

    Raises:
        UnsupportedError: it reads sound.
    """
    model = _load(name, dtype)
    from polyhead.generation import SpeechToText

    if isinstance(model, SpeechToText):
        raise UnsupportedError(
            f"{name} {_WORDS['SpeechToText']}: this verb takes models that read text"
        )
    return model


def _load(
    name: str, dtype: str | None, device: str = "cpu", activations: str | None = None
) -> Model:
    from polyhead.cli.terminal import progress

    with progress(f"loading {name}") as advance:
        # torch is imported here, which takes a second itself
        from polyhead.generation import load

        loaded: Model = load(name, dtype, device=device, progress=advance, activations=activations)
        return loaded
