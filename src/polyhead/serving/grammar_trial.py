"""A grammar is tried in a process of its own before this one compiles it.

llguidance is compiled code with limits of its own, but none on the depth of a chain of references,
on remainders (``multipleOf``) or on the length of a regular expression: a request could overflow
the stack, or take minutes and all of the memory. The process that tries it has little of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from polyhead.errors import InputError

SECONDS = 0.5
"""Processor time that a grammar may take, and its first tokens."""

_WAIT = 20.0
"""Seconds after which the process is killed, whatever it waits for."""

_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import faulthandler, threading
from llguidance import LLMatcher, LLTokenizer
faulthandler.disable()
try:
    import signal
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
except (ImportError, AttributeError, OSError, ValueError):
    pass  # what is not limited here, as on Windows, is by the parent's clock
grammar = sys.stdin.buffer.read().decode()

def words():
    tokenizer = LLTokenizer("byte", slices=[])
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for _ in range(16):
        allowed = matcher.compute_logit_bias()
        token = next((i for i in range(256) if allowed[i]), None)
        if matcher.is_error() or token is None or not matcher.consume_token(token):
            break
    return matcher.get_error() if matcher.is_error() else None

def work():
    try:
        found = words()
    except BaseException as error:  # a panic of compiled code too
        found = repr(error)
    print(json.dumps([found]))

threading.stack_size(1 << 20)  # less than any thread that compiles it afterwards
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@lru_cache(maxsize=64)
def tried(grammar: str) -> str | None:
    """What is wrong with a grammar in one of llguidance's forms; None where it may be compiled.

    Raises:
        InputError: The machine has no time to try it.
        RuntimeError: No process of Python can be started.
    """
    line = [sys.executable, "-I", "-c", _SCRIPT, json.dumps(sys.path), str(SECONDS)]
    try:
        done = subprocess.run(line, input=grammar.encode(), capture_output=True, timeout=_WAIT)
    except subprocess.TimeoutExpired:
        raise InputError(f"the grammar was not compiled within {_WAIT:g} s") from None
    if done.returncode < 0 or done.returncode >> 30 == 3:  # a signal ended it; a fault on Windows
        return f"it is too complex: it takes more than {SECONDS:g} s, 1 GiB or 1 MiB of stack"
    if done.returncode or not done.stdout:
        raise RuntimeError(f"a grammar could not be tried: {done.stderr.decode()[-1000:]}")
    found: str | None = json.loads(done.stdout)[0]
    return found
