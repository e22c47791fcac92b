"""The base of masks and biases: the arguments that recreate them, and equality by these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from polyhead._utils.extensions import is_of_extension
from polyhead.semantics.tokens import is_traced


class Component:
    """Base of ``Mask`` and ``Bias``: one component of an attention specification.

    A class lists its constructor's arguments, ``class Window(Mask, arguments={"size": int, …})``,
    with their types for ``isinstance``, and keeps each as an attribute of that name. They define
    the object: files store them, and what a kernel computed for one object serves another with
    equal arguments, so they are assigned once. A class without this list cannot be saved, and its
    objects equal themselves.

    torch takes every class for a constant: a component is an argument of modules that are exported.
    """

    arguments: ClassVar[Mapping[str, Any] | None] = None
    uses_rule: ClassVar[bool] = False
    """True if it is defined by ``rule``, not by ``visible`` or ``values``."""

    def __init_subclass__(cls, arguments: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.arguments = arguments
        _pytree.register_constant(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and self.arguments is not None and name in self.arguments:
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} cannot be assigned, since layers and decode plans have read it: "
                f"build another {kind}"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same class and the same arguments."""
        if self is other:
            return True
        if type(self) is not type(other) or self.arguments is None:
            return False
        return all(same(getattr(self, name), getattr(other, name)) for name in self.arguments)

    def __hash__(self) -> int:
        if self.arguments is None:
            return object.__hash__(self)
        values = (getattr(self, name) for name in self.arguments)
        return hash((type(self), *(x for x in values if isinstance(x, int | float | Component))))


def same(a: Any, b: Any) -> bool:
    """Whether two arguments say the same; traced tensors equal themselves alone."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and not (is_traced(a) or is_traced(b)) and torch.equal(a, b)


def inherit_no_shortcut(
    cls: type[Component], base: type[Component], drawn: str, *shortcuts: str
) -> None:
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
    cls.uses_rule = "rule" in own
    old = [name for name in (*shortcuts, drawn) if name not in own]
    for name in old:
        setattr(cls, name, getattr(base, name))


def kinds(base: type[Component]) -> Iterator[type[Component]]:
    """The classes below ``base`` of polyhead and its extensions that tell their arguments."""
    for cls in base.__subclasses__():
        own = cls.__module__.startswith("polyhead.")
        if cls.arguments is not None and (own or is_of_extension(cls)):
            yield cls
        yield from kinds(cls)
