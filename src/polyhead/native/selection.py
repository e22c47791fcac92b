"""Finds the compiled code that this processor can run, and tests it before it is used.

``POLYHEAD_NATIVE`` fixes the choice: the name of a code, or ``first`` for the first that gives
right results, whatever is faster.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polyhead.native import batch_invariant, tensor_check
from polyhead.native.arguments import DTYPES
from polyhead.native.code import Code
from polyhead.native.fastest import Choice, fastest
from polyhead.native.self_test import disagreement


@cache
def all_codes() -> tuple[Code, ...]:
    """The codes that this processor can run, best first, tested or not."""
    module = tensor_check.MODULE
    if module is None:
        return ()
    return tuple(
        Code(module, i, name) for i, (name, runs_here) in enumerate(module.codes()) if runs_here
    )


VARIABLE, FIRST = "POLYHEAD_NATIVE", "first"
_forced: list[Code] = []
_wrong: dict[str, str] = {}


@cache
def _chosen() -> Code | None:
    """The first code that gives right results, or the one that the environment names."""
    named = os.environ.get(VARIABLE, FIRST)
    names = [code.name for code in all_codes()]
    if names and named != FIRST and named not in names:
        raise ValueError(f"{VARIABLE} must be {FIRST} or one of {', '.join(names)}: got {named}")
    return next(
        (each for each in all_codes() if named in (FIRST, each.name) and _is_right(each)), None
    )


@cache
def _is_right(candidate: Code) -> bool:
    """Whether a code passes its test, in a thread of its own: no mode of the caller applies."""
    with ThreadPoolExecutor(1) as elsewhere:
        wrong = elsewhere.submit(disagreement, candidate).result()
    if wrong is not None:
        _wrong[candidate.name] = wrong
        warnings.warn(
            f"the native code for {candidate.name} is switched off: {wrong}", stacklevel=2
        )
    return wrong is None


@cache
def choices() -> Mapping[torch.dtype, Choice]:
    """What was chosen by measuring; empty where one code alone has vectors, or one is named."""
    codes = [each for each in all_codes() if each.name != "portable"]
    if len(codes) < 2 or VARIABLE in os.environ:
        return {}
    right = [each for each in codes if _is_right(each)]
    if len(right) < 2:
        return {}
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(fastest, right).result()


@cache
def _fastest() -> dict[torch.dtype, Code]:
    """The codes of ``choices``, told in which dtypes their products are as fast as torch's."""
    by_name = {each.name: each for each in all_codes()}
    found = {}
    for dtype, choice in choices().items():
        each, prompts = by_name[choice.steps], by_name[choice.prompts]
        if prompts is not each:
            each = each.with_prompts(prompts)
        each.dtypes = each.dtypes | {dtype} if choice.gemm else each.dtypes - {dtype}
        found[dtype] = each
    return found


def code(dtype: torch.dtype | None = None) -> Code | None:
    """The code in use, or None where nothing was compiled.

    Args:
        dtype: Of what is computed: the fastest code for it, where several were measured. In
            batch-invariant mode the first all the same, so that no bit depends on a timing.
    """
    if _forced:
        return _forced[-1]
    first = _chosen()
    if dtype is None or first is None or batch_invariant.is_enabled():
        return first
    return _fastest().get(dtype, first)


def left_out() -> str | None:
    """The name of the best code for this processor, if it was not compiled."""
    codes = all_codes()
    best: str | None = tensor_check.MODULE.best() if tensor_check.MODULE is not None else None
    return best if codes and codes[0].name != best else None


def switched_off() -> dict[str, str]:
    """The codes that the test at first use found wrong, by name, and what was wrong."""
    _chosen()
    return dict(_wrong)


def code_for(x: Tensor) -> Code | None:
    """The code in use, if it may replace torch's operations on x.

    Not while gradients are recorded, nor under autocast, dispatch modes, functorch, compilation or
    ``torch.jit.trace``, which would record none of what native code writes.
    """
    if (
        torch.is_grad_enabled()
        or type(x) is not Tensor
        or not x.is_cpu
        or x.dtype not in DTYPES
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or batch_invariant.is_watched()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cpu")
        or not tensor_check.is_plain(x)
    ):
        return None
    return code(x.dtype)


def code_with_autograd(*tensors: Tensor) -> Code | None:
    """The code in use, if a function of autograd may call it in place of torch's operations.

    Whether gradients are recorded or not, and under autocast: its caller knows what is rounded.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or any(x.dtype not in DTYPES for x in tensors)
        or batch_invariant.is_watched()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or tensor_check.MODULE is None
        or tensor_check.unsupported_tensor_kind(tensors) is not None
    ):
        return None
    return code(tensors[0].dtype)


def is_plain(parameter: Tensor, x: Tensor) -> bool:
    """Whether a parameter can be read beside x as it lies in memory."""
    return (
        parameter.dtype is x.dtype
        and parameter.is_contiguous()
        and tensor_check.is_plain(parameter)
    )


@contextmanager
def using(chosen: Code) -> Iterator[None]:
    """Within the block, this code is used in place of the fastest one."""
    _forced.append(chosen)
    try:
        yield
    finally:
        _forced.pop()


def _why_not_compiled() -> str:
    """The error that ``setup.py`` recorded when it could not compile."""
    try:
        return Path(__file__).with_name("not_compiled.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return "install g++ 12 or newer, or clang 14 or newer, then install polyhead again"


def unavailable() -> str | None:
    """Why there is no native code here and how to get it, or None."""
    if code() is not None:
        return None
    if tensor_check.DIFFERENCES:
        return (
            f"compiled from other sources ({tensor_check.DIFFERENCES[0]}); build again "
            "(python setup.py build_ext --inplace)"
        )
    if tensor_check.MODULE is None:
        return f"not compiled: {_why_not_compiled()}"
    return "no code compiled for this processor gave right results"


# What torch.compiler.assume_constant_result would write, without importing the compiler.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]
