"""Loads a model for a command, with a progress bar where it takes a while."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyhead.errors import InputError, UnsupportedError, shortened

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder, TextToText
    from polyhead.serving.http.served import Models

PREDICTOR = "mtp"
"""A draft's name that stands for the decoder's own module of multi-token prediction."""

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
    adapters: Sequence[str] = (),
    draft: str | None = None,
    packing: Mapping[str, str | None] = MappingProxyType({}),
    prepare: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Models:
    """Models with what runs them.

    Args:
        sources: What to load, by the names that requests use.
        dtype, device: As ``polyhead.load`` takes them.
        engine: Options of a decoder's engine.
        adapters: ``NAME=DIR`` of the only decoder, or ``MODEL:NAME=DIR``.
        draft: What guesses tokens of the only decoder: a model, or ``"mtp"``.
        packing: ``quantize`` and ``activations`` of ``polyhead.load``.
        prepare: Is shown every model before its engine is made.
        settings: Of ``Models``.

    Raises:
        UnsupportedError: A model that is not served.
        InputError: An adapter of no model, or a draft of none or several.
    """
    from polyhead.checkpoints import load_predictor
    from polyhead.generation import LanguageModel, SpeechToText, TextEncoder
    from polyhead.serving.http.served import Models, Served

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # long texts are read beside others
    kinds = LanguageModel, TextEncoder, SpeechToText
    models = {
        name: load_expecting(source, dtype, *kinds, device=device, **packing)
        for name, source in sources.items()
    }
    if prepare is not None:
        for model in models.values():
            prepare(model)
    decoders = [name for name, model in models.items() if isinstance(model, LanguageModel)]
    given = adapters_of(decoders, adapters)
    if draft is not None:
        if len(decoders) != 1:
            raise InputError(f"--draft guesses tokens of one decoder: got {len(decoders)} of them")
        name = decoders[0]
        made = (
            load_predictor(sources[name], models[name])
            if draft == PREDICTOR
            else load_expecting(draft, dtype, LanguageModel, device=device, **packing)
        )
        engine = {**engine, "draft": made}
    return Models(
        *(
            Served.of(name, model, **engine, adapters=given.get(name))
            for name, model in models.items()
        ),
        **settings,
    )


def adapters_of(decoders: Sequence[str], given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Directories of adapters by the name of their model and by their own.

    Args:
        decoders: Names of the served decoders.
        given: ``NAME=DIR`` of the only one, or ``MODEL:NAME=DIR``.

    Raises:
        InputError: Another form, or an adapter of no decoder or of several.
    """
    found: dict[str, dict[str, str]] = {}
    for text in given:
        name, equals, directory = text.partition("=")
        of = next((each for each in decoders if name.startswith(f"{each}:")), None)
        if of is not None:
            name = name.removeprefix(f"{of}:")
        elif len(decoders) == 1:
            of = decoders[0]
        if not (name and equals and directory):
            raise InputError(f"--adapter must be NAME=DIR: got {shortened(text)}")
        if of is None:
            raise InputError(
                f"--adapter {shortened(text)}: write MODEL:NAME=DIR, with one of the served "
                f"decoders: {', '.join(decoders) or 'there are none'}"
            )
        if name in found.setdefault(of, {}):
            raise InputError(f"two adapters are called {name!r}")
        found[of][name] = directory
    return found
