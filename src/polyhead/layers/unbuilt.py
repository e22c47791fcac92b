"""Choices that configurations can say and no module computes yet, refused by name."""

from __future__ import annotations

import dataclasses

from polyhead.config import Data
from polyhead.errors import UnsupportedError


def refuse_unbuilt(config: Data, *names: str) -> None:
    """Raises UnsupportedError where one of these fields is not at its default."""
    for field in dataclasses.fields(config):
        if field.name not in names:
            continue
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if (value := getattr(config, field.name)) != default:
            raise UnsupportedError(
                f"{type(config).__name__}.{field.name}={value!r} is not computed yet"
            )
