"""llama.cpp in a process of its own, with as many threads as torch has here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyhead.lab.benchmarks.case import Wall

_REST = 0.02
"""Seconds for threads to fall asleep, torch's before llama.cpp is asked and its own afterwards.

They spin for some milliseconds, and what is measured meanwhile takes a fifth longer.
"""

# llama.cpp prints other lines too; answers are recognized by their first characters.
_MARK = "answer: "
_SERVER = f"""
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
import xllamacpp

callers, tokens = int(sys.argv[3]), int(sys.argv[4])
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.verbosity = callers * tokens, callers, -1
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[2])
server, pool = xllamacpp.Server(parameters), ThreadPoolExecutor(callers)
for line in sys.stdin:
    asked, begin, busy = json.loads(line), time.perf_counter(), time.process_time()
    answers = [*pool.map(server.handle_completions, asked)]
    taken = time.perf_counter() - begin, time.process_time() - busy
    print({_MARK!r} + json.dumps([answers, *taken]), flush=True)
"""


@dataclass(frozen=True)
class Told:
    """Seconds of work as llama.cpp measures them."""

    seconds: float


class LlamaCpp:
    """A model file that llama.cpp runs, greedy.

    Args:
        file: Of the model.
        callers: Sequences at a time; default 1.
        tokens: Of a sequence at most, prompt and text; default 2,048.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(self, file: Path, callers: int = 1, tokens: int = 2048) -> None:
        numbers = torch.get_num_threads(), callers, tokens
        command = [sys.executable, "-c", _SERVER, str(file), *map(str, numbers)]
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

    def texts(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[list[str], Wall]:
        """Texts of ``new`` tokens after prompts that are asked for at the same time."""
        options = {"max_tokens": new, "ignore_eos": True, "cache_prompt": False}
        answers, taken = self._ask_all([{"prompt": [*ids], **options} for ids in prompts])
        return [answer["choices"][0]["text"] for answer in answers], taken

    def _ask(self, ids: list[int], **options: Any) -> dict[str, Any]:
        (answer,), _ = self._ask_all([{"prompt": ids, "cache_prompt": True} | options])
        return answer

    def _ask_all(self, requests: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Wall]:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        time.sleep(_REST)
        pipe_in.write(json.dumps([{"temperature": 0} | each for each in requests]) + "\n")
        pipe_in.flush()
        for line in pipe_out:
            if line.startswith(_MARK):
                answers, wall, processor = json.loads(line.removeprefix(_MARK))
                time.sleep(_REST)
                return answers, Wall(wall, processor)
        raise RuntimeError(f"llama.cpp ended with code {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
