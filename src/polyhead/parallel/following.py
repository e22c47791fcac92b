"""What the other ranks do while one leads a model: the calls that it tells, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch

from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import SharedPool
from polyhead.kernels.batch_invariant import batch_invariant
from polyhead.models import Transformer
from polyhead.parallel.messages import read, receive
from polyhead.parallel.ranks import Ranks

OF_MODEL = "hidden_states", "logits", "new_cache"
"""Methods of a model."""
_OF_CACHES = "rollback", "crop", "reorder", "reset", "fork"
_OF_POOLS = "row", "join", "keep", "release", "shrink"
_CALLS: dict[str, Callable[..., Any]] = {"pool": SharedPool} | {
    name: lambda of, *given, _name=name, **options: getattr(of, _name)(*given, **options)
    for name in (*OF_MODEL, *_OF_CACHES, *_OF_POOLS)
}
"""What ranks may be told to do."""


def follow(model: Transformer, ranks: Ranks) -> None:
    """Makes the calls that the leader tells, until it says that it has ended.

    Raises:
        RankError: The leader is gone.
        Exception: A call that this rank fails in; the others then find it gone.
    """
    objects: dict[int, Any] = {0: model}
    numbers = count(1)
    while True:
        told = read(receive(ranks), objects, ranks.device)
        for number in told["gone"]:
            del objects[number]
        if told["do"] == "end":
            return
        if told["do"] == "beat":
            continue
        with batch_invariant() if told["exact"] else nullcontext(), torch.inference_mode():
            made = _CALLS[told["do"]](told["of"], *told["given"], **told["options"])
        if isinstance(made, ModelCache | SharedPool):
            objects[next(numbers)] = made
        del told, made
