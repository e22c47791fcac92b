"""Latent attention against transformers' DeepSeek layer: decode steps over a long past, one run.

    python benchmarks/latent.py [--heads 128] [--cached 4096] [--steps 5]

Both layers hold the same weights and the same cached tokens, are checked for equality first, and
are timed in turns: ours absorbed, ours expanded, theirs. The limit is one pass over the bytes that
an absorbed step has to read (weights and latent cache), at the rate of a plain copy measured in the
same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from polyhead.layers.latent_layout import from_deepseek
from torch import Tensor

import polyhead as ph
from polyhead.caches import LatentCache
from polyhead.layers import LatentAttentionConfig, MultiHeadLatentAttention

EMBED = 2048  # V2-Lite's; the projections outside of attention are the same work for both


def theirs(heads: int) -> tuple[Any, Any]:
    """transformers' layer and its rotary module, in V3's head sizes."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    config = DeepseekV3Config(
        hidden_size=EMBED,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=163_840,
    )
    config._attn_implementation = "sdpa"
    layer = DeepseekV3Attention(config, 0).eval()
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer, DeepseekV3RotaryEmbedding(config)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy_rate(size: int) -> float:
    """Bytes per second read by a plain copy, the best of five."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    return source.nbytes / min(timed(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--heads", type=int, default=128)
    options.add_argument("--cached", type=int, default=4096)
    options.add_argument("--steps", type=int, default=5)
    given = options.parse_args()
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    peer, rotary = theirs(given.heads)
    settings = LatentAttentionConfig(given.heads, 512, 128, 64, 128, q_lora_rank=1536)
    layer = MultiHeadLatentAttention.from_config(EMBED, settings).eval()
    layer.load_state_dict(from_deepseek(peer.state_dict(), settings))

    past = torch.randn(1, given.cached, EMBED)
    x = torch.randn(1, 1, EMBED)
    cache, peer_cache = LatentCache(512, 64), DynamicCache()

    def ours(computation: Any) -> Tensor:
        out = layer(x, mask=ph.Causal(), cache=cache, computation=computation)
        cache.rollback(1)
        return out

    def peers() -> Tensor:
        position = torch.tensor([[given.cached]])
        out: Tensor = peer(
            x,
            position_embeddings=rotary(x, position),
            attention_mask=None,
            past_key_values=peer_cache,
        )[0]
        peer_cache.crop(-1)
        return out

    with torch.no_grad():
        _, _, latent = layer._project(past, 0)
        cache.append(latent, latent[..., :512])
        # The same tokens, rotary rows in their order: theirs is interleaved and then split in half.
        c, r = latent.split((512, 64), dim=-1)
        peer_cache.update(c, r, 0)

        expected = peers()
        errors = {
            name: (ours(name) - expected).abs().max().item() for name in ("absorbed", "expanded")
        }
        for name, error in errors.items():
            if error > 1e-4 * expected.abs().max().item():
                raise SystemExit(f"{name} differs from transformers by {error:.2e}")

        times: dict[str, list[float]] = {"absorbed": [], "expanded": [], "transformers": []}
        for _ in range(given.steps):
            times["absorbed"] += [timed(lambda: ours("absorbed")) for _ in range(5)]
            times["expanded"].append(timed(lambda: ours("expanded")))
            times["transformers"].append(timed(peers))
    median = {name: statistics.median(each) for name, each in times.items()}
    least = sum(p.nbytes for p in layer.parameters()) + cache.used_bytes
    limit = least / copy_rate(min(least, 1 << 28))

    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, float32")
    print(f"{given.heads} heads, 512 + 64, {given.cached} cached tokens, one decode step")
    for name, seconds in median.items():
        error = f"   max error {errors[name]:.1e}" if name in errors else ""
        print(f"  {name:<14}{seconds * 1e3:>10.2f} ms{error}")
    print(f"  {'bytes once':<14}{limit * 1e3:>10.2f} ms")
    print(
        json.dumps(
            {
                "heads": given.heads,
                "cached": given.cached,
                "ms": {name: round(seconds * 1e3, 3) for name, seconds in median.items()},
                "limit_ms": round(limit * 1e3, 3),
                "ratio_to_transformers": round(median["transformers"] / median["absorbed"], 2),
                "ratio_to_expanded": round(median["expanded"] / median["absorbed"], 2),
                "max_error": errors,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
