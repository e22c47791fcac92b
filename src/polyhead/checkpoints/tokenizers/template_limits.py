"""A Jinja sandbox in which a template can do only so much work.

A chat template comes with the weights: it is untrusted code. Jinja's sandbox keeps it from objects
that it should not see, but not from counting to 99,999² or from building a string of 10⁹
characters. Here everything that takes time or memory is paid for from a budget *before* it is done:
a step of a loop, a call, a filter, a test, an operator, and what is compared, joined or written.
Prices are in units of about one step of a loop, or 8 characters:

- a value costs its *weight*: 1, and what is in it;
- a filter or a method of a string costs the weight of its value times the weight of its arguments,
  where a whole number weighs as much as characters: so ``center(10**9)``, ``replace``, ``join`` and
  ``batch`` need no rules of their own;
- lists and dicts cannot be changed in the sandbox, so a weight is computed once: a list that holds
  itself twice, thirty times over, weighs 2³⁰ and takes 30 objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_CHARACTERS_PER_UNIT = 8
_UNITS = 500_000
_UNITS_PER_WEIGHT = 100
"""Budget for each unit of input: real templates look at a message about ten times."""

_AT_ONCE = frozenset(("attr", "count", "d", "default", "first", "last", "length", "random", "safe"))
"""Filters whose time does not depend on the size of a container."""

_SHALLOW = frozenset(
    ("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
)
"""Filters that look at a container's entries and not into them."""

_CALL = 5
"""A macro call takes about five times as long as a step of a loop."""

_MOST_BITS = 128
_LONGEST_FORMAT = 10_000
_WIDE = re.compile(r"\d{5}|\{[^}]*\{|%[^a-zA-Z]*\*")
"""In a format string: a width beyond 9,999, or one that stands elsewhere."""


class TooMuchWork(Exception):
    """A template has spent its budget."""


class Budget:
    """What one run of a template may still spend.

    Args:
        given: The values that the template starts with.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._left = 0
        self._left = _UNITS + _UNITS_PER_WEIGHT * self.weight(dict(given))

    def spend(self, units: int) -> None:
        """Pays for what is about to be done.

        Raises:
            TooMuchWork: Nothing is left.
        """
        self._left -= units
        if self._left < 0:
            raise TooMuchWork

    def weight(self, value: Any) -> int:
        """The size of a value: characters, entries, entries of entries."""
        if isinstance(value, str | bytes):
            return 1 + len(value) // _CHARACTERS_PER_UNIT
        if isinstance(value, range):
            return 1 + len(value) // _CHARACTERS_PER_UNIT
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return 1
        known = self._known.get(id(value))
        if known is None:
            self._left -= len(value)
            parts: Iterable[Any] = value
            if isinstance(value, dict):
                parts = (part for pair in value.items() for part in pair)
            known = value, 1 + sum(map(self.weight, parts))
            self._known[id(value)] = known  # keeps the value alive, so that its id is not reused
        return known[1]

    def shallow(self, value: Any) -> int:
        """What looking at each entry of a container once costs."""
        return 1 + len(value) if isinstance(value, list | tuple | dict) else self.weight(value)

    def factor(self, arguments: Iterable[Any]) -> int:
        """The factor by which arguments may multiply a value."""
        return 1 + sum(
            1 + abs(value) // _CHARACTERS_PER_UNIT if isinstance(value, int) else self.weight(value)
            for value in arguments
        )


_budget: ContextVar[Budget] = ContextVar("_budget")


@contextmanager
def spending(given: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, templates of this thread or task spend one budget."""
    token = _budget.set(Budget(given))
    try:
        yield
    finally:
        _budget.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; its templates run only inside ``spending``."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        # Without the optimizer: it runs filters of constants before there is a budget.
        super().__init__(optimized=False, **options)
        self.globals["namespace"] = _Opaque
        del self.globals["lipsum"]
        self.filters = {name: _paid(name, work) for name, work in _functions(self.filters)}
        self.tests = {name: _paid(name, work) for name, work in _functions(self.tests)}
        self.filters |= {"_counted": _Counted, "_weighed": _weighed, "_written": _weighed}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Makes a function a filter that is paid for."""
        self.filters[name] = _paid(name, work)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found = _Priced().visit(tree)
        assert isinstance(found, nodes.Template)
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.spend(1 + budget.shallow(left) + budget.shallow(right))
        if operator == "%" and isinstance(left, str | bytes):
            _check_format(left)
            budget.spend(budget.weight(left) * budget.factor([right]))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                    budget.spend(budget.shallow(sequence) * max(0, count))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(1, right) if operator == "**" else 1)
            if bits > _MOST_BITS or right.bit_length() > _MOST_BITS:
                raise TooMuchWork
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        # Jinja adds the variables of the loop and of the block for functions that take a context.
        given = (value for key, value in kwargs.items() if not key.startswith("_"))
        arguments = [*args, *given]
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(called, LoopContext):  # a recursive loop
            args = tuple(map(_Counted, args))
        if isinstance(owner, str | bytes | int | float) and not isinstance(owner, bool):
            if getattr(called, "__name__", "") in ("format", "format_map"):
                _check_format(owner)
            budget.spend(budget.weight(owner) * budget.factor(arguments))
        else:
            budget.spend(_CALL + budget.shallow(owner) + sum(map(budget.weight, arguments)))
        found = super().call(context, called, *args, **kwargs)
        budget.spend(budget.shallow(found))
        return found


class _Priced(NodeTransformer):
    """Puts a filter that spends around whatever Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if isinstance(node.iter, nodes.Expr):
            node.iter = _through("_counted", node.iter)
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        children = (child for child in node.nodes if isinstance(child, nodes.Expr))
        node.nodes = [_through("_written", _unescaped(child)) for child in children]
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = [_through("_weighed", child) for child in node.nodes]
        return self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node.expr = _through("_weighed", node.expr)
        for operand in node.ops:
            operand.expr = _through("_weighed", operand.expr)
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice) and isinstance(node.node, nodes.Expr):
            node.node = _through("_weighed", node.node)
        return self.generic_visit(node)


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _unescaped(node: nodes.Expr) -> nodes.Expr:
    """A template's own text as a value, which autoescape leaves as it is."""
    if isinstance(node, nodes.TemplateData):
        return nodes.MarkSafeIfAutoescape(nodes.Const(node.data, lineno=node.lineno))
    return node


class _Counted:
    """What a loop runs over, paid for step by step."""

    def __init__(self, over: Any) -> None:
        self._over = over

    def __len__(self) -> int:
        return len(self._over)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for entry in self._over:
            budget.spend(1)
            yield entry


class _Opaque(Namespace):
    """A namespace can be changed, so its weight is never known: it is written as its name alone."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _weighed(value: Any) -> Any:
    budget = _budget.get()
    budget.spend(budget.weight(value))
    return value


def _functions(table: Mapping[str, Any]) -> Iterable[tuple[str, Callable[..., Any]]]:
    return table.items()


def _paid(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that costs the weight of its value times that of its arguments."""
    own = hasattr(work, "jinja_pass_arg")  # the first argument is Jinja's own

    @functools.wraps(work)
    def paid(*args: Any, **kwargs: Any) -> Any:
        value, *arguments = args[own:]
        arguments += kwargs.values()
        budget = _budget.get()
        if name in _AT_ONCE and not isinstance(value, str):
            weight = 1
        else:
            weight = budget.shallow(value) if name in _SHALLOW else budget.weight(value)
        if name == "format":
            _check_format(value)
        if name == "sum" and not all(isinstance(entry, int | float | str) for entry in arguments):
            raise SecurityError("sum adds numbers")  # of lists it takes quadratic time
        if name == "join" and not isinstance(value, str | list | tuple | dict):
            value = list(_Counted(value))
            args = (*args[:own], value, *args[own + 1 :])
            weight = budget.weight(value)
        budget.spend(weight * budget.factor(arguments))
        found = work(*args, **kwargs)
        budget.spend(1 if name in _AT_ONCE else budget.shallow(found))
        return found

    return paid


def _check_format(form: Any) -> None:
    if len(form) > _LONGEST_FORMAT or _WIDE.search(str(form)):
        raise SecurityError("a format string must be short and its widths below 10,000")
