"""A command that ``torchrun`` starts in several processes, which share one model."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import typer

from polyhead.errors import InputError, UnsupportedError


def count() -> int:
    """Processes that torchrun started.

    Raises:
        InputError: Its variable is no number of processes.
    """
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or not int(given):
        raise InputError(f"WORLD_SIZE must be a number of processes, from 1: got {given!r}")
    return int(given)


def check(given: Mapping[str, object]) -> None:
    """Raises for options that many processes do not take.

    Args:
        given: By name whether one was given.

    Raises:
        UnsupportedError: Names it.
    """
    for name, value in given.items():
        if value:
            raise UnsupportedError(
                f"{name} on {count()} processes (WORLD_SIZE) cannot be: they serve one decoder, "
                "split over them, on CPUs"
            )


def lead(stack: ExitStack, model: Any) -> None:
    """Splits a model over all processes, of which the first goes on and leads the others.

    Args:
        stack: What it ends, the others end.
        model: A ``LanguageModel``, the same in all processes.

    Raises:
        Exit: On the others, once the first has ended; signals do not end them before.
        PolyheadError: What ``parallelize`` and ``led`` raise.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from polyhead import parallel

    dist.init_process_group("gloo")
    stack.callback(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (count(),), mesh_dim_names=("tensor",))
    parallel.parallelize(model.transformer, mesh, training=False)
    if dist.get_rank():
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # torchrun and a terminal send them to all
    if not stack.enter_context(parallel.led(model.transformer)):
        raise typer.Exit
