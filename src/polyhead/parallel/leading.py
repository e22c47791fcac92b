"""``parallel.led``: the first rank calls a model, the others compute their parts of its calls.

    with parallel.led(model) as leads:     # the others get here when the first has ended
        if leads:
            with Engine(language_model) as engine: ...

What decides what is computed (a queue, a clock, free memory, a sampler, rules in Python) is on the
first rank alone. Before it calls the model, changes a cache of it or moves its pages, it tells the
others the call, and they make the same one. So caches are alike on all ranks, and what drives a
model of one process drives one of many.

Caches and pools are numbered as they are made, and messages name them by their numbers.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from socket import gethostname
from typing import Any, TypeVar

import torch

from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import SharedPool
from polyhead.models import Transformer
from polyhead.native.batch_invariant import is_enabled
from polyhead.parallel.calls import DIMENSIONS
from polyhead.parallel.following import OF_MODEL, follow
from polyhead.parallel.led_caches import LedCache, LedPool
from polyhead.parallel.messages import send, written
from polyhead.parallel.ranks import RankError, Ranks, unsupported
from polyhead.parallel.regions import gathers_logits
from polyhead.planning.memory import free_memory
from polyhead.serving.split import Split

BEAT = 5.0
"""Seconds after which an idle leader says that it is there."""

_Made = TypeVar("_Made")


@contextmanager
def led(model: Transformer) -> Iterator[bool]:
    """For the block, the first rank alone calls a model that ``parallelize`` put on ``tensor``.

    All ranks enter. On the first the block runs, and a call of the model or a change of its caches
    is told to the others, from any thread, one after the other. The others stay here, compute their
    parts until the block of the first has ended, and then go on with False. An idle leader says
    every ``BEAT`` seconds that it is there; one that says nothing for the timeout of the process
    group counts as gone.

    Calls are made under ``torch.inference_mode()`` and, where the leader makes them so, within
    ``ph.batch_invariant()``. A call that fails on one rank cannot be made up for: from then on all
    calls raise RankError, here and on the others.

    Args:
        model: A decoder, after ``parallelize(model, mesh, training=False)`` on a mesh of the one
            dimension ``tensor``; it is put into evaluation mode.

    Yields:
        Whether this is the rank that leads.

    Raises:
        UnsupportedError: Another mesh or model, ``loss_parallel`` or ``sequence_parallel``; later,
            an argument that the others cannot be told, by name: masks, quantized caches.
        RankError: A rank is gone or does something else; names it. On all ranks.
    """
    dimensions, refused = DIMENSIONS.get(model, []), None
    try:
        _check(model, dimensions)
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = error
    if not dimensions:
        assert refused is not None
        raise refused
    ranks: Ranks = getattr(vars(model).get("logits"), "ranks", dimensions[0])
    host = zlib.crc32(gethostname().encode())
    told = ranks.agree("parallel.led", [host, free_memory()], refused)
    hosts = [each for each, _ in told]
    free = min(bytes_ // hosts.count(host) for host, bytes_ in told)
    model.eval()
    if ranks.rank:
        follow(model, ranks)
        yield False
        return
    leader = Leader(model, ranks, free)
    try:
        yield True
    finally:
        leader.close()


def _check(model: Transformer, dimensions: Sequence[Ranks]) -> None:
    names = [each.name for each in dimensions]
    if names != ["tensor"]:
        raise unsupported(
            "a model that one rank leads on other meshes than of the one dimension 'tensor': got "
            f"{', '.join(names) or 'a model that was not parallelized'}"
        )
    if model.config.kind != "decoder" or model.config.head is None:
        raise unsupported(f"a model that one rank leads, other than a decoder: {model.config.kind}")
    shards = [getattr(vars(each).get("forward"), "shards", None) for each in model.modules()]
    if any(shards) or not gathers_logits(model):
        raise unsupported("loss_parallel or sequence_parallel of a model that one rank leads")


class Leader:
    """Tells the other ranks what this one does with a model.

    Args:
        model: It; its methods are replaced until ``close``.
        ranks: Those that have its parts.
        free: Bytes of memory that each of them has free.
    """

    def __init__(self, model: Transformer, ranks: Ranks, free: int) -> None:
        self._model, self.ranks = model, ranks
        self._lock, self._busy, self._lost = threading.RLock(), False, ""
        self._numbers = weakref.WeakKeyDictionary[Any, int]({model: 0})
        self._next, self._gone = count(1), list[int]()
        self._before = {name: getattr(model, name) for name in OF_MODEL}
        for name, method in self._before.items():
            run = self._new_cache if name == "new_cache" else method
            vars(model)[name] = partial(self.call, model, name, run)
        pool = partial(LedPool, leader=self)
        vars(model)["split"] = Split(ranks.size, free, pool, self.lost)
        self._closed = (
            f"ranks of {ranks.name!r} exchange nothing but in calls that rank "
            f"{ranks.global_rank(0)} tells (parallel.led): hidden_states, logits, those of caches"
        )
        ranks.close(self._closed)
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._beats, name="polyhead-leader", daemon=True)
        self._beat.start()

    def lost(self) -> RankError | None:
        """Why no call can succeed any more."""
        return RankError(self._lost) if self._lost else None

    def call(
        self, of: object, do: str, run: Callable[..., _Made], *given: Any, **options: Any
    ) -> _Made:
        """``run(*given, **options)`` on all ranks, there as the method ``do`` of their object.

        Within another call it is a part of that, and nothing is told.
        """
        with self._lock:
            if self._busy:
                return run(*given, **options)
            if self._lost:
                raise RankError(self._lost)
            message = self._message(of, do, given, options)
            with self._telling(do), torch.inference_mode():
                send(self.ranks, message)
                made = run(*given, **options)
            if isinstance(made, ModelCache | SharedPool):
                self._numbers[made] = number = next(self._next)
                weakref.finalize(made, self._gone.append, number)
            return made

    def _message(self, of: object, do: str, given: Any = (), options: Any = None) -> bytes:
        told = {"of": of, "do": do, "given": given, "options": options or {}}
        gone = [*self._gone]
        message = written(told | {"exact": is_enabled(), "gone": gone}, self._numbers.get)
        del self._gone[: len(gone)]
        return message

    @contextmanager
    def _telling(self, do: str) -> Iterator[None]:
        """For a block in which ranks exchange something; once it fails nothing else can."""
        self._busy = True
        self.ranks.close("")
        try:
            yield
        except BaseException as error:
            self._lost = str(error)
            if not isinstance(error, RankError):
                what, rank = f"{type(error).__name__}: {error}", self.ranks.global_rank(0)
                self._lost = f"{do} failed on rank {rank}, which leads the others: {what}"
            if not isinstance(error, Exception):
                raise
            raise RankError(self._lost) from error
        finally:
            self._busy = False
            self.ranks.close(self._lost or self._closed)

    def _new_cache(self, *given: Any, **options: Any) -> ModelCache:
        return LedCache(self._before["new_cache"](*given, **options), self)

    def _beats(self) -> None:
        while not self._ended.wait(BEAT):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._lost:
                        with self._telling("a beat"):
                            send(self.ranks, self._message(None, "beat"))
                except RankError:
                    return
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Lets the other ranks go, and the model be as before.

        Raises:
            RankError: One of them is gone.
        """
        self._ended.set()
        self._beat.join()
        with self._lock:
            vars(self._model).update(self._before)
            del vars(self._model)["split"]
            if not self._lost:
                with self._telling("the end"):
                    send(self.ranks, self._message(None, "end"))
                self.ranks.close("")
