"""Loading a model for a verb, with a progress bar where it takes a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder


def load_any(name: str, dtype: str = "float32") -> LanguageModel | TextEncoder:
    """The model called ``name``, a decoder or an encoder.

    Raises:
        InputError: it is an encoder-decoder.
    """
    from polyhead.cli.terminal import progress

    with progress(f"loading {name}") as advance:
        # torch is imported here, which takes a second itself
        from polyhead.generation import LanguageModel, TextEncoder, load

        model = load(name, dtype, progress=advance)
    if not isinstance(model, LanguageModel | TextEncoder):
        raise InputError(
            f"{name} is an encoder-decoder: polyhead.load({name!r}).generate(...) uses it from "
            "Python, this verb takes decoders and encoders"
        )
    return model


def load_decoder(name: str, dtype: str = "float32") -> LanguageModel:
    """The model called ``name``, which must be one that writes text.

    Raises:
        InputError: it is an encoder.
    """
    model = load_any(name, dtype)
    from polyhead.generation import LanguageModel

    if not isinstance(model, LanguageModel):
        raise InputError(f"{name} is an encoder: it reads text and does not write any")
    return model
