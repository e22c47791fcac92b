"""Exchanges of torch's ``fully_shard`` that name the process that is gone.

On a CPU an exchange that fails raises where it was called, in the middle of a forward or backward
pass; on a GPU torch's own watchdog ends the process, and there everything is left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from polyhead.parallel.ranks import Ranks

# torch renames both in 2.13.
_SUM = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class Watched:
    """One kind of exchange, as ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` take it.

    Attributes:
        ranks: Ranks that take part in the exchange.
        what: What for, as messages say it.
        summed: Whether gradients are summed and cut; otherwise parameters are gathered.
    """

    ranks: Ranks
    what: str
    summed: bool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any
    ) -> Any:
        exchange = _SUM if self.summed else _GATHER
        with self.ranks.watched(self.what):
            return exchange(output_tensor, input_tensor, group=group, **options)


def watch_shards(module: FSDPModule, group: dist.ProcessGroup, name: str) -> None:
    """From now on an exchange of a module's parameters that fails says which process is gone."""
    ranks = Ranks.of_group(group, name, "cpu")
    module.set_custom_all_gather(Watched(ranks, "a gathering of parameters", False))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(Watched(ranks, "a sum of gradients", True))  # type: ignore[arg-type]
