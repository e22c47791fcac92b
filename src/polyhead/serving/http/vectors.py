"""``/v1/embeddings``: one vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from polyhead._utils.checks import shown
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation import TextEncoder
from polyhead.serving.http.errors import refused
from polyhead.serving.http.options import required

MOST_TEXTS = 2_048
"""Most texts of one request."""


def embeddings(model: TextEncoder, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request; runs the model.

    Raises:
        ApiError: an input that is no text, too many, or longer than the model's context.
    """
    given = required(options, "input")
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MOST_TEXTS:
        raise refused("input", f"input must be at most {MOST_TEXTS:,} texts: got {len(texts):,}")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise refused("input", f"input[{number}] must be a text: got {shown(text)}")
    try:
        tokens = sum(len(model.encoded(number, text).ids) for number, text in enumerate(texts))
    except (ContextLengthError, InputError) as error:
        raise refused("input", str(error)) from error
    vectors = model.encode(texts)
    if options.get("encoding_format") == "base64":
        packed = vectors.numpy().astype("<f4")
        found: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in packed]
    else:
        found = vectors.tolist()
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": each}
            for index, each in enumerate(found)
        ],
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
