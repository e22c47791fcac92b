"""Batch-invariant mode flag, which ``polyhead.batch_invariant`` sets.

It holds for the thread that entered it, as modes of torch's dispatcher do, of which it is one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._device import DeviceContext


class _State(threading.local):
    modes = 0


_state = _State()


def is_enabled() -> bool:
    """Whether this thread is inside ``polyhead.batch_invariant()``."""
    return _state.modes > 0


def is_watched() -> bool:
    """Whether a mode watches torch's functions or operations here, other than that one."""
    if torch._C._len_torch_function_stack() and any(
        type(mode) is not DeviceContext  # names a device for what is made
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    ):
        return True
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and modes > _state.modes


def elementwise() -> AbstractContextManager[None]:
    """For a block of copies, sums and products by element, which are exact as torch computes them.

    Within ``polyhead.batch_invariant()`` the mode then does not see them, which saves most of their
    time for a few numbers.
    """
    if _state.modes == 0 or is_watched():
        return nullcontext()
    guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


@contextmanager
def enabled() -> Iterator[None]:
    """Sets the flag for a block, which enters one dispatch mode."""
    _state.modes += 1
    try:
        yield
    finally:
        _state.modes -= 1
