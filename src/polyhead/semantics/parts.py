"""The base of masks and biases: arguments that recreate them, and one meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class Part:
    """A part of an attention's meaning.

    A class lists its constructor's arguments, ``class Window(Mask, arguments={"size": int, …})``,
    with their types for ``isinstance``, and keeps each as an attribute of that name. They define
    the object: files store them, and what a kernel computed for one object serves another with
    equal arguments. A class without this list cannot be saved.
    """

    arguments: ClassVar[Mapping[str, Any] | None] = None
    ruled: ClassVar[bool] = False
    """Whether what is drawn follows from ``rule``."""

    def __init_subclass__(cls, arguments: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.arguments = arguments


def inherit_no_shortcut(cls: type[Part], base: type[Part], drawn: str, *shortcuts: str) -> None:
    """Removes inherited faster methods from a class that defines another rule.

    Args:
        cls: A class that was just defined.
        base: Where the general form of each method stands.
        drawn: The method that draws a tile, by ``rule`` unless a class defines it.
        shortcuts: The methods that answer faster what follows from either.
    """
    own = vars(cls)
    if "rule" not in own and drawn not in own:
        return
    cls.ruled = "rule" in own
    old = [name for name in (*shortcuts, drawn) if name not in own]
    for name in old:
        setattr(cls, name, getattr(base, name))


def kinds(base: type[Part]) -> Iterator[type[Part]]:
    """The classes below ``base`` that belong to polyhead and tell their arguments."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("polyhead.") and cls.arguments is not None:
            yield cls
        yield from kinds(cls)
