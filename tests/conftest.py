"""In one of several processes that share the tests, torch keeps to one thread.

The collector of garbage stands still while tests are collected, and leaves alone for good what was
made by then: a fifth of the time that collecting takes, and of every full collection after it.
"""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two teams of threads on the same cores wait for each other; read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"

# What a test compares must not depend on which code was the fastest in some process.
os.environ.setdefault("POLYHEAD_NATIVE", "first")

gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
