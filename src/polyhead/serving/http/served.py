"""The models that a server has, by name, and the thread that runs each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polyhead._utils.checks import shown
from polyhead.errors import InputError
from polyhead.generation import LanguageModel, SpeechToText, TextEncoder
from polyhead.serving.engine import Engine
from polyhead.serving.grammars import Grammars
from polyhead.serving.http.errors import ApiError, server_ending

MOST_WAITING = 64
"""Requests that wait for an encoder or a speech model, above which further ones get 429."""

_KINDS: Mapping[type, str] = {
    LanguageModel: "decoders",
    TextEncoder: "encoders of text",
    SpeechToText: "models that read sound",
}
_Made = TypeVar("_Made")


class Worker:
    """One thread for a model that does not batch its requests by itself; first come, first served.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, f"polyhead-{name}")
        self.waiting, self._closed = 0, False

    async def run(self, work: Callable[[], _Made]) -> _Made:
        """The result of ``work``.

        Raises:
            ApiError: 429 where too many wait.
        """
        if self.waiting >= MOST_WAITING:
            raise ApiError(
                429, f"{self.waiting} requests wait for this model", code="queue_full",
                retry_after=5,
            )  # fmt: skip
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except (asyncio.CancelledError, RuntimeError):
            if not self._closed:
                raise
            raise server_ending() from None
        finally:
            self.waiting -= 1

    def close(self, timeout: float) -> None:
        """Waits for the work, for so many seconds; what waits longer is dropped."""
        end = time.monotonic() + timeout
        while self.waiting and time.monotonic() < end:
            time.sleep(0.02)
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Served:
    """A model under its name, or one of its adapters.

    Attributes:
        adapter: With which adapter of the engine requests are computed; None: none.
        parent: Name of the model that an adapter belongs to.
        engine: Runs a decoder's requests; None for other models.
        grammars: Of a decoder.
        worker: Runs other models.
        created: Seconds since 1970, for ``/v1/models``.
    """

    name: str
    model: Any
    engine: Engine | None = None
    grammars: Grammars | None = None
    worker: Worker | None = None
    adapter: str | None = None
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, name: str, model: Any, **options: Any) -> Served:
        """A model with what runs it.

        Args:
            options: Of a decoder's ``Engine``.
        """
        if isinstance(model, LanguageModel):
            stops = model.stop_ids(model.options)
            grammars = Grammars(model.tokenizer, model.config.num_logits, stops)
            return cls(name, model, Engine(model, **options), grammars)
        return cls(name, model, worker=Worker(name))

    def adapted(self) -> Iterator[Served]:
        """Its adapters, which the same engine computes."""
        for name in () if self.engine is None else self.engine.adapters.names:
            yield replace(self, name=name, adapter=name, parent=self.name)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "polyhead",
            **({} if self.parent is None else {"parent": self.parent}),
        }


class Models(Mapping[str, Served]):
    """The served models and their adapters, by name; an adapter also as ``MODEL:ADAPTER``.

    Args:
        models: They, without their adapters.
        timeout: Seconds that a request may take; None: any.
        max_new_tokens: New tokens of a chat that does not say how many.

    Attributes:
        loaded: The models, without their adapters.

    Raises:
        InputError: Two of one name.
    """

    def __init__(
        self,
        *models: Served,
        timeout: float | None = 600.0,
        max_new_tokens: int = 1024,
    ) -> None:
        self.loaded = models
        self._models: dict[str, Served] = {}
        self._in_full: dict[str, Served] = {}
        for each in (*models, *(one for model in models for one in model.adapted())):
            if each.name in self._models:
                raise InputError(
                    f"two models or adapters are called {each.name!r}: requests could not tell "
                    "them apart"
                )
            self._models[each.name] = each
            if each.parent is not None:
                self._in_full[f"{each.parent}:{each.name}"] = each
        self.timeout, self.max_new_tokens = timeout, max_new_tokens

    def __getitem__(self, name: str) -> Served:
        return self._models.get(name) or self._in_full[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, options: Mapping[str, Any], kind: type, where: str) -> Served:
        """The model that a request names, or the only one of its kind.

        Raises:
            ApiError: 404 for a name that is not served, 400 for a model of another kind.
        """
        name = options.get("model")
        right = [each for each in self.loaded if isinstance(each.model, kind)]
        if name is None and len(right) == 1:
            return right[0]
        found = self.get(name or "")
        if found is None:
            raise ApiError(
                404, f"model {shown(name)} is not served: {', '.join(self._models)}",
                param="model", code="model_not_found",
            )  # fmt: skip
        if not isinstance(found.model, kind):
            raise ApiError(
                400, f"{where} takes {_KINDS[kind]}: {found.name} is none", param="model"
            )
        return found

    @property
    def lost(self) -> Exception | None:
        """Why a model answers no more: a process that has a part of it is gone; None: all do."""
        found = (each.engine.lost for each in self.loaded if each.engine is not None)
        return next(filter(None, found), None)

    def start(self) -> None:
        """Starts the engines."""
        for each in self.loaded:
            if each.engine is not None:
                each.engine.start()

    def close(self, timeout: float) -> None:
        """Ends the engines and the threads; requests have ``timeout`` seconds to finish."""
        end = time.monotonic() + timeout
        for each in self.loaded:
            if each.engine is not None:
                each.engine.close(max(0.0, end - time.monotonic()))
            if each.worker is not None:
                each.worker.close(max(0.0, end - time.monotonic()))
