"""Loads a model for a command, with a progress bar where it takes a while."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyhead.errors import UnsupportedError

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder, TextToText
    from polyhead.serving.http.served import Models

_WORDS = {
    "LanguageModel": "is a decoder, which continues a text (polyhead generate)",
    "TextEncoder": "is an encoder, which reads text and does not write any (polyhead look)",
    "TextToText": "is an encoder-decoder, which turns a text into another (polyhead translate)",
    "SpeechToText": "is an encoder-decoder that reads sound (polyhead transcribe)",
}
_KINDS = {
    "LanguageModel": "decoders",
    "TextEncoder": "encoders",
    "TextToText": "encoder-decoders that read text",
    "SpeechToText": "models that read sound",
}


def load_expecting(
    name: str,
    dtype: str | None,
    *kinds: type,
    device: str = "cpu",
    **packing: str | None,
) -> Any:
    """The model called ``name``, which must be of one of these kinds.

    Args:
        name, dtype, device: As ``polyhead.load`` takes them.
        kinds: Classes of models that the command takes.
        packing: ``quantize`` and ``activations`` of ``polyhead.load``.
    """
    from polyhead.cli.terminal import progress

    with progress(f"loading {name}") as advance:
        # torch is imported here, which takes a second itself
        from polyhead.generation import load

        model: Any = load(name, dtype, device=device, progress=advance, **packing)
    if not isinstance(model, kinds):
        wanted = " and ".join(_KINDS[kind.__name__] for kind in kinds)
        raise UnsupportedError(
            f"{name} {_WORDS[type(model).__name__]}: this command takes {wanted}"
        )
    return model


def load_any(
    name: str, dtype: str = "float32", device: str = "cpu"
) -> LanguageModel | TextEncoder | TextToText:
    """The model called ``name``, of any kind that reads text."""
    from polyhead.generation import LanguageModel, TextEncoder, TextToText

    model: LanguageModel | TextEncoder | TextToText = load_expecting(
        name, dtype, LanguageModel, TextEncoder, TextToText, device=device
    )
    return model


def load_served(
    sources: Mapping[str, str],
    dtype: str | None,
    device: str,
    engine: dict[str, Any],
    **settings: Any,
) -> Models:
    """Models with what runs them.

    Args:
        sources: What to load, by the names that requests use.
        dtype, device: As ``polyhead.load`` takes them.
        engine: Options of a decoder's engine.
        settings: Of ``Models``.

    Raises:
        UnsupportedError: A model that is not served.
    """
    from polyhead.generation import LanguageModel, SpeechToText, TextEncoder
    from polyhead.serving.http.served import Models, Served

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # long texts are read beside others
    kinds = LanguageModel, TextEncoder, SpeechToText
    return Models(
        *(
            Served.of(name, load_expecting(source, dtype, *kinds, device=device), **engine)
            for name, source in sources.items()
        ),
        **settings,
    )
