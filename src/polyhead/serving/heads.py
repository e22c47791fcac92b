"""What a head of a running request looks at: seen in the next step of its row, by a probe.

The step gives the same tokens with a probe as without; only the layers that are asked for keep
their queries and keys, until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.interpret.probe import probe
from polyhead.models.parts import head_count
from polyhead.serving.row import Row
from polyhead.serving.split import split_of

_Made = TypeVar("_Made")


class HeadRow(NamedTuple):
    """The weights of one head from the last token of a text.

    Attributes:
        ids: The text's n tokens.
        weights: One for each, float.
    """

    ids: list[int]
    weights: list[float]


class RowHeads:
    """Heads of running requests that were asked for.

    Args:
        model: The engine's.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._lock = model, threading.Lock()
        self._asked: list[tuple[str, int, int, Future[HeadRow]]] = []

    def ask(self, request: str, layer: int, head: int) -> Future[HeadRow]:
        """What a head looks at in the next step of a request that writes; any thread may ask.

        Args:
            request: Its ``id``; of one that takes no step more nothing comes: wait with a timeout.
            layer, head: Counted from 0.

        Raises:
            InputError: No such layer or head.
            UnsupportedError: Other processes have some of the heads.
        """
        if split_of(self._model.transformer) is not None:
            raise UnsupportedError("heads of a model that is split over processes are not shown")
        heads = head_count(self._model.transformer, layer)
        if not 0 <= head < heads:
            raise InputError(f"heads of layer {layer} are 0 to {heads - 1}: got {head}")
        found: Future[HeadRow] = Future()
        with self._lock:
            self._asked = [each for each in self._asked if not each[-1].cancelled()]
            self._asked.append((request, layer, head, found))
        return found

    def watched(
        self, rows: Sequence[Row], read: Sequence[Sequence[int]], step: Callable[[], _Made]
    ) -> _Made:
        """The result of a step of rows, each of which reads tokens; what was asked for is seen.

        What cannot be seen is an error for those who asked, and the step is taken without.
        """
        if not self._asked:
            return step()
        places = {row.request.id: place for place, row in enumerate(rows)}
        with self._lock:
            asked = [each for each in self._asked if each[0] in places]
            self._asked = [each for each in self._asked if each[0] not in places]
        asked = [each for each in asked if each[-1].set_running_or_notify_cancel()]
        if not asked:
            return step()
        try:
            with probe(self._model, sorted({layer for _, layer, _, _ in asked})) as seen:
                made = step()
        except Exception as error:
            for *_, found in asked:
                found.set_exception(error)
            return step()
        for request, layer, head, found in asked:
            try:
                place = places[request]
                query = len(read[place]) - 1  # guesses come behind
                weights = seen[layer].rows(heads=head, queries=query)[place, 0, 0]
                ids = rows[place].all_ids
                found.set_result(HeadRow(ids, weights[: len(ids)].tolist()))
            except Exception as error:
                found.set_exception(error)
        return made
