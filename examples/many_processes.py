"""One model on many processes: a few steps of training, then a text longer than one rank remembers.

torchrun --nproc-per-node=2 examples/many_processes.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import polyhead as ph
from polyhead import parallel
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, RopeConfig

TOKENS = 256


def model() -> ph.Transformer:
    """A small decoder, the same on all ranks: weights are drawn from one seed."""
    torch.manual_seed(0)
    layer = LayerConfig(AttentionConfig(4, 2, 16, rope=RopeConfig()), FeedForwardConfig(128))
    return ph.Transformer(ph.TransformerConfig("decoder", 64, 64, 4096, (layer, layer)))


def train(steps: int = 8) -> list[float]:
    """The loss of every step on texts that repeat themselves, spread over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    net = parallel.parallelize(model(), mesh)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(64, (4, 16), generator=generator).repeat(1, TOKENS // 16 + 1)
        texts, labels = ids[:, :TOKENS], ids[:, 1 : TOKENS + 1]
        logits = net(parallel.shard(texts, mesh))
        loss = parallel.cross_entropy(logits, parallel.shard(labels, mesh), mesh)
        optimiser.zero_grad()
        loss.backward()
        parallel.clip_grad_norm(net, 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def serve(new_tokens: int = 8) -> tuple[list[int], list[int]]:
    """Tokens chosen greedily behind a long text, and how many tokens each rank remembers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    net = parallel.parallelize(model().eval(), mesh, training=False)
    ids = torch.randint(64, (1, 2048), generator=torch.Generator().manual_seed(1))
    chosen = []
    with torch.inference_mode():
        cache = net.new_cache()
        logits = net(ids, cache=cache, last=1)
        for _ in range(new_tokens):
            token = logits[:, -1:].argmax(dim=-1)
            chosen.append(int(token))
            logits = net(token, cache=cache)
    held = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    held[dist.get_rank()] = cache.used_bytes
    dist.all_reduce(held)
    return chosen, held.tolist()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train()
    chosen, held = serve()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"tokens {chosen}")
        print("bytes remembered by each rank:", ", ".join(f"{count:,}" for count in held))
    dist.destroy_process_group()
