"""llama.cpp in a process of its own, with as many threads as torch has here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# llama.cpp prints other lines too; answers are recognized by their first characters.
_MARK = "answer: "
_SERVER = f"""
import json, sys
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.verbosity = 2048, 1, -1
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(parameters)
for line in sys.stdin:
    print({_MARK!r} + json.dumps(server.handle_completions(json.loads(line))), flush=True)
"""


@dataclass(frozen=True)
class Told:
    """Seconds of work as llama.cpp measures them."""

    seconds: float


class LlamaCpp:
    """A model file that llama.cpp runs: greedy, one sequence, 2,048 tokens at most.

    Raises:
        RuntimeError: The process ended; the message has its last words.
    """

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", _SERVER, str(file), str(torch.get_num_threads())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def prefill(self, ids: list[int]) -> Told:
        """Reads a prompt into an empty cache."""
        timings = self._ask(ids, max_tokens=1, cache_prompt=False)["timings"]
        return Told(timings["prompt_ms"] / 1e3)

    def decode(self, ids: list[int], steps: int) -> Told:
        """``steps`` tokens one by one after a prompt that stays in the cache."""
        # The first token comes out of the prompt, and its time counts as the prompt's.
        answer = self._ask(ids, max_tokens=steps + 1, ignore_eos=True)
        return Told(answer["timings"]["predicted_ms"] / 1e3)

    def next_token(self, ids: list[int]) -> int:
        """The likeliest token after a prompt."""
        answer = self._ask(ids, max_tokens=1, logprobs=1)
        token: int = answer["choices"][0]["logprobs"]["content"][0]["id"]
        return token

    def _ask(self, ids: list[int], **options: Any) -> dict[str, Any]:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        request = {"prompt": ids, "temperature": 0, "cache_prompt": True} | options
        pipe_in.write(json.dumps(request) + "\n")
        pipe_in.flush()
        for line in pipe_out:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return answer
        raise RuntimeError(f"llama.cpp ended with code {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
