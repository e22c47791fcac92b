"""Many processes: models, attention and caches on torch.distributed.

from polyhead import parallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "context"))
model = parallel.parallelize(model, mesh)
logits = model(parallel.shard(ids, mesh))
loss = parallel.cross_entropy(logits, parallel.shard(labels, mesh), mesh)
"""

from polyhead.parallel.attention import attention, gather, shard
from polyhead.parallel.leading import led
from polyhead.parallel.losses import cross_entropy
from polyhead.parallel.model import parallelize
from polyhead.parallel.plans import ParallelPlan, plan
from polyhead.parallel.ranks import RankError
from polyhead.parallel.training import clip_grad_norm, whole_state

__all__ = [
    "ParallelPlan",
    "RankError",
    "attention",
    "clip_grad_norm",
    "cross_entropy",
    "gather",
    "led",
    "parallelize",
    "plan",
    "shard",
    "whole_state",
]
