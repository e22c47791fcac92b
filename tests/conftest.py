"""In one of several processes that share the tests, torch keeps to one thread."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two teams of threads on the same cores wait for each other; read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
