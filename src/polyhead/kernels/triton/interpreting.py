"""Whether Triton interprets its kernels on a CPU, which the tests ask for."""

from __future__ import annotations

import os


def interpreting() -> bool:
    """Whether ``TRITON_INTERPRET=1`` is set; Triton looks at it when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
