"""Which classes of transformers use its attention interface, read off their source.

A model that computes attention itself would ignore ``attn_implementation="polyhead"`` in silence,
and nothing that transformers tells about a model says so. Some look their attention class up by
name, in a table of their file that knows ``"eager"`` and ``"sdpa"`` and no registered name.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache, wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from polyhead.errors import UnsupportedError

NAME = "polyhead"
"""The default name under which attention and mask function are registered."""


def _modeling_module(config_class: type) -> ModuleType | None:
    """The module that defines the models of a configuration, if it has been imported."""
    return sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))


# A constant to a compiler, which could not follow it into source files.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reason_against(config_class: type) -> str | None:
    """Why the models of a configuration would ignore polyhead, or None."""
    module = _modeling_module(config_class)
    return None if module is None else reason_against_module(module)


def reason_against_module(module: ModuleType) -> str | None:
    for table, classes in _tables(module):
        return _reason_of_table(module, table, classes)
    names = _own_attention(module)
    return reason(module.__name__.rpartition(".")[2], names) if names else None


_watched = False


def watch_construction(names: set[str]) -> None:
    """Makes every model that is given one of ``names`` check that it can use it.

    transformers calls this method of each model before its layers are built, and has no place for
    such a question of a registered function.
    """
    global _watched
    if _watched:
        return
    theirs = PreTrainedModel.get_correct_attn_implementation

    @wraps(theirs)
    def ours(
        self: PreTrainedModel, requested_attention: str | None, *rest: Any, **more: Any
    ) -> str:
        if requested_attention in names:
            _refuse_in_tables(type(self), requested_attention)
        return theirs(self, requested_attention, *rest, **more)

    PreTrainedModel.get_correct_attn_implementation = ours  # type: ignore[method-assign]
    _watched = True


def _refuse_in_tables(model_class: type, name: str) -> None:
    """Makes the tables that a model would look its attention up in answer with the reason.

    Without this transformers stops with ``KeyError: 'polyhead'``. The refusal comes from the table
    and not from the model's class, because another part of the same file may be served.
    """
    for base in model_class.__mro__:
        module = sys.modules[base.__module__]
        for table, classes in _tables(module):
            classes.setdefault(name, _Refusal(_reason_of_table(module, table, classes)))


class _Refusal:
    """Raises the reason where an attention class is constructed."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(self._why)


def _tables(module: ModuleType) -> list[tuple[str, dict[str, Any]]]:
    """The tables of attention classes by name that a modeling file has."""
    return [
        (name, table)
        for name, table in vars(module).items()
        if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table
    ]


def _reason_of_table(module: ModuleType, table: str, classes: dict[str, Any]) -> str:
    theirs = [name for name, cls in classes.items() if not isinstance(cls, _Refusal)]
    instead = "sdpa" if "sdpa" in theirs else "eager"
    why = (
        f"{module.__name__.rpartition('.')[2]} looks its attention class up by name in {table} "
        f"({', '.join(theirs)}) and asks no registered function, so attn_implementation={NAME!r} "
        f"cannot serve it: pass attn_implementation={instead!r}"
    )
    if _INTERFACE in _source(module):
        parts = {"": NAME, "vision_config": instead}
        why += f", or only for the part that it concerns, such as {parts}"
    return why


def reason(what: str, classes: str) -> str:
    return (
        f"{what} computes attention itself in {classes} and would ignore attn_implementation="
        f"{NAME!r}: transformers offers no way in; use a model whose attention asks "
        "transformers' AttentionInterface"
    )


@cache
def _own_attention(module: ModuleType) -> str:
    """The attention classes of a modeling file, if they are there and none asks the interface."""
    if _INTERFACE in _source(module):
        return ""
    classes = re.findall(r"^class (\w*Attention\w*)", _source(module), re.MULTILINE)
    return ", ".join(name for name in classes if _SOFTMAX.search(_class_source(module, name)))


@cache
def computes_attention_itself(cls: type) -> bool:
    """Whether a class called …Attention… takes a softmax, and neither it nor a base asks."""
    takes_softmax = any(_SOFTMAX.search(text) for text in _sources(cls))
    return "Attention" in cls.__name__ and takes_softmax and not asks_interface(cls)


@cache
def asks_interface(cls: type) -> bool:
    """Whether a class, or one that it derives from, asks transformers' attention interface."""
    return any(_INTERFACE in text for text in _sources(cls))


_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_SOFTMAX = re.compile(r"softmax\(|Softmax\(|scaled_dot_product_attention\(")
_NOT_MODELS = ("torch.", "builtins", "polyhead.", "transformers.modeling_utils")


def _sources(cls: type) -> list[str]:
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(_NOT_MODELS)]
    return [_class_source(sys.modules[base.__module__], base.__name__) for base in bases]


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _class_source(module: ModuleType, name: str) -> str:
    """The source of a class; ``inspect.getsource`` parses the whole file for every one."""
    found = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", _source(module), re.MULTILINE | re.DOTALL)
    return found.group() if found else ""
