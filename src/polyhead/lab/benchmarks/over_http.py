"""The same texts through OpenAI's API: the server on a thread of this process, clients in another.

Every client has a connection of its own and reads a stream.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from polyhead.generation import LanguageModel
from polyhead.lab.benchmarks.case import Wall

_CLIENTS = """
import asyncio, json, sys, time

async def said(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
    content = json.dumps(body).encode()
    writer.write(f"{head}Content-Length: {len(content)}\\r\\n\\r\\n".encode() + content)
    found = await reader.read(-1)
    writer.close()
    return found

def text(found):
    lines = [line for line in found.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

async def all_of(port, bodies):
    return await asyncio.gather(*(said(port, body) for body in bodies))

for line in sys.stdin:
    port, bodies = json.loads(line)
    begin = time.perf_counter()
    found = asyncio.run(all_of(port, bodies))
    taken = time.perf_counter() - begin
    print(json.dumps([[*map(text, found)], taken]), flush=True)
"""


class OverHttp:
    """A server of a model and its clients.

    Args:
        model: It; a text ends by its length alone.
        options: Of the engine.
    """

    def __init__(self, model: LanguageModel, **options: Any) -> None:
        from polyhead.serving.http.app import application
        from polyhead.serving.http.connections import Server
        from polyhead.serving.http.served import Models, Served

        models = Models(Served.of("served", model, **options))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = Server(application(models), models, "error")
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        self._clients = subprocess.Popen(
            [sys.executable, "-c", _CLIENTS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def texts(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[list[str], Wall]:
        """Texts of ``new`` tokens; the clock is the clients', the processor's time this process's.

        Raises:
            RuntimeError: The process of the clients ended.
        """
        pipe_in, pipe_out = self._clients.stdin, self._clients.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        options = {"max_tokens": new, "temperature": 0, "stream": True}
        bodies = [{"prompt": [*ids], **options} for ids in prompts]
        busy = time.process_time()
        pipe_in.write(json.dumps([self._listener.getsockname()[1], bodies]) + "\n")
        pipe_in.flush()
        if not (line := pipe_out.readline()):
            raise RuntimeError(f"the clients ended with code {self._clients.wait()}")
        busy = time.process_time() - busy
        texts, wall = json.loads(line)
        return texts, Wall(wall, busy)

    def close(self) -> None:
        """Ends both."""
        self._clients.kill()
        self._clients.communicate()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
