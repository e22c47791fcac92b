"""How much memory a call takes, as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured(run: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that were allocated at a time, beyond those before, and what ``run`` gave."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, result
