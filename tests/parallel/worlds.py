"""Processes for tests: started once, they run functions by name and say what went wrong.

    with World(2) as world:
        world.run("cases_of_attention:equal", {"exchange": "ring"})

Every process calls the same function with the same arguments and its mesh. A function raises where
it finds a difference; the tracebacks of all ranks come back.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.multiprocessing as mp


class World:
    """Processes with a gloo group, for as long as the block lasts."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout

    def __enter__(self) -> Self:
        context = _imported_once()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, port, there, self.timeout), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def tell(self, name: str, *arguments: Any) -> list[Any]:
        """What every process returned, or its error as text."""
        for pipe in self.pipes:
            pipe.send((name, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(self.timeout):
                raise TimeoutError(f"rank {rank} said nothing of {name} for {self.timeout} s")
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append(("gone", ""))
        return answers

    def run(self, name: str, *arguments: Any) -> list[Any]:
        """What every process returned; raises what any of them raised."""
        answers = self.tell(name, *arguments)
        failed = [f"rank {i}: {what}" for i, (kind, what) in enumerate(answers) if kind != "ok"]
        if failed:
            raise AssertionError("\n".join(failed))
        return [what for _, what in answers]


def _imported_once() -> Any:
    """Processes forked from one that has imported everything and started no thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":  # whatever other networks the machine has or has not
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    home = str(Path(__file__).parent)
    if home not in sys.path:
        sys.path.insert(0, home)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["polyhead.parallel.model", "polyhead.models"])
    return context


def _serve(rank: int, size: int, port: int, pipe: Any, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        home, _, function = name.partition(":")
        try:
            answer = "ok", getattr(importlib.import_module(home), function)(*arguments)
        except Exception as error:
            answer = type(error).__name__, f"{error}\n{traceback.format_exc()}"
        pipe.send(answer)
