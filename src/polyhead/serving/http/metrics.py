"""Figures for Prometheus: what the engines count, and how long requests take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from polyhead.serving.http.served import Models

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_GAUGES = {
    "live": "requests_running",
    "queued": "requests_waiting",
    "used_tokens": "cache_tokens_used",
    "free_tokens": "cache_tokens_free",
}
_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "cached_tokens": "cached_prompt_tokens",
    "preemptions": "preemptions",
    "guessed_tokens": "guessed_tokens",
    "accepted_tokens": "accepted_guessed_tokens",
}
_WORDS = {
    "requests_running": "Requests that are being computed",
    "requests_waiting": "Requests in the queue",
    "cache_tokens_used": "Tokens in the pool of cache pages",
    "cache_tokens_free": "Tokens that the pool has room for",
    "prompt_tokens": "Tokens of prompts that were read",
    "output_tokens": "Tokens that were written",
    "cached_prompt_tokens": "Tokens of prompts that were in the cache",
    "preemptions": "Requests that gave their pages back and were queued again",
    "guessed_tokens": "Tokens that were guessed and checked",
    "accepted_guessed_tokens": "Guessed tokens that were right",
}


class Metrics:
    """The figures of one server.

    Args:
        models: Whose engines are counted.
        paths: Addresses that are told apart; the others are "other".
    """

    def __init__(self, models: Models, paths: frozenset[str]) -> None:
        self._registry, self._paths = CollectorRegistry(), paths
        engines: Any = _Engines(models)
        self._registry.register(engines)
        self._requests = Counter(
            "polyhead_requests", "Requests by address and status", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "polyhead_request_seconds", "From a request's head to the end of its answer", ("path",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._first = Histogram(
            "polyhead_first_event_seconds", "From a request's head to the first part of its answer",
            ("path",), buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip

    def text(self) -> tuple[bytes, str]:
        """The figures, and the media type of their form."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def watching(self, app: Any) -> Any:
        """An application whose requests are counted."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in self._paths else "other"
            started, status, begun = time.perf_counter(), 0, False

            async def counted(message: Any) -> None:
                nonlocal status, begun
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif not begun:
                    begun = True
                    self._first.labels(path).observe(time.perf_counter() - started)
                await send(message)

            try:
                await app(scope, receive, counted)
            finally:
                self._seconds.labels(path).observe(time.perf_counter() - started)
                self._requests.labels(path, str(status or 499)).inc()  # 499: the client left

        return watched


class _Engines:
    """The engines' own counts, read when they are asked for."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for field, name in names.items():
                metric = family(f"polyhead_{name}", _WORDS[name], labels=["model"])
                for each in self._models.loaded:
                    if each.engine is not None:
                        metric.add_metric([each.name], getattr(each.engine.stats, field))
                yield metric
