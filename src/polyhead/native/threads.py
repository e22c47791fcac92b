"""How many threads native code computes on: as many as torch, and one in a forked child.

The threads of OpenMP do not survive a fork, and the runtime (GNU's, which torch brings) waits
for them forever. torch's own operations hang in such a child too; spawned processes, or a child
that calls ``torch.set_num_threads(1)`` first, are not affected."""

from __future__ import annotations

import os
import warnings

import torch

from polyhead.native import tensor_check

_in_child = False
_warned = False


def _forked() -> None:
    global _in_child, _warned
    _in_child, _warned = True, False


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forked)


def threads() -> int:
    """torch's number of threads; 1 in a process that was forked, with a warning once."""
    global _warned
    count = torch.get_num_threads()
    if not _in_child or count == 1:
        return count
    if not _warned:
        _warned = True
        warnings.warn(
            "this process was forked, and threads do not survive that: polyhead's native code "
            f"computes on 1 thread instead of {count}, and torch's own operations may hang; start "
            'processes with multiprocessing.get_context("spawn"), or call '
            "torch.set_num_threads(1) first",
            RuntimeWarning,
            stacklevel=3,
        )
    return 1


def end_team() -> None:
    """Ends the threads that this one computes with; its next computation starts others.

    For a thread that computes nothing for now: where a process has more threads than processors,
    the runtime puts those that wait to sleep at once, of other teams too.
    """
    if tensor_check.MODULE is not None and not _in_child:
        tensor_check.MODULE.end_team()
