"""What an engine must know of a model whose parts are on several processes.

``polyhead.parallel.led`` says it, under ``transformer.split``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import SharedPool
from polyhead.errors import UnsupportedError
from polyhead.layers.hooks import Hooked


@dataclass(frozen=True)
class Split:
    """A model whose heads are shared by several processes, of which this one leads.

    Attributes:
        ranks: How many they are.
        free_memory: Bytes that each of them has free: the least of all, where those of one machine
            share its memory.
        new_pool: A pool of pages on all of them, of an empty cache.
        lost: Why no call of the model can succeed any more; None: calls can.
    """

    ranks: int
    free_memory: int
    new_pool: Callable[[ModelCache], SharedPool]
    lost: Callable[[], Exception | None]


def split_of(transformer: nn.Module) -> Split | None:
    """How a model is split; None: it is not.

    Raises:
        UnsupportedError: It is split outside ``parallel.led``, so that the other processes would
            not compute their parts.
    """
    found: Split | None = vars(transformer).get("split")
    if found is None and any(
        isinstance(module, Hooked) and module.is_split for module in transformer.modules()
    ):
        raise UnsupportedError(
            "a model whose parts are on other processes is served within "
            "polyhead.parallel.led(model), so that they compute them"
        )
    return found
