"""Chosen keys against all keys, and against torch's gather and attention of the same keys, one run.

    python benchmarks/sparse.py [--threads 1] [--repeats 5]

Three ways are timed in turns: ours over all keys, ours over the chosen ones, and what one writes
without such an operation: torch copies the chosen keys, then its fused attention runs (for
BlockSparse: torch's fused attention with the mask drawn). Results of the last two are compared
first, in float32. The last line is JSON, in milliseconds.

    python benchmarks/sparse.py --choice [--threads 1] [--repeats 5]

times an indexer's choice alone (64 heads of 128, the best 2,048 keys): native code, and torch's
operations on tiles, which run where native code may not. Seconds of the processor, which other
programs change little; both must choose the same keys but for a few whose scores nearly tie.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.kernels.choosing import choose_keys
from polyhead.semantics import DenseSource

Ways = tuple[str, Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]


def gathered(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Torch's attention over copies of the chosen blocks ``[1, G, T, m]``, for each query."""
    G, T, R = k.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    keys = (blocks[..., None] * size + torch.arange(size)).flatten(-2)  # [1, G, T, m · size]
    rows = torch.arange(G)[:, None, None]
    chosen_k, chosen_v = (x[0][rows, keys[0]].flatten(0, 1)[:, None] for x in (k, v))
    queries = q[0].unflatten(0, (G, R)).transpose(1, 2).flatten(0, 1)  # [G · T, R, D]
    out = F.scaled_dot_product_attention(queries[:, None], chosen_k, chosen_v)
    return out[:, 0].unflatten(0, (G, T)).transpose(1, 2).flatten(0, 1)[None]


def cases() -> Iterator[Ways]:
    """What is computed, and the three ways: ours full, ours sparse, torch's."""

    def chosen(name: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int) -> Ways:
        mask = ph.Chosen(blocks, size, q.shape[1] // k.shape[1])
        return (
            name,
            lambda: ph.attention(q, k, v),
            lambda: ph.attention(q, k, v, mask=mask),
            lambda: gathered(q, k, v, blocks, size),
        )

    q, k, v = (torch.randn(1, n, t, 128) for n, t in ((32, 1), (8, 32_768), (8, 32_768)))
    for size, count in ((128, 16), (16, 128)):
        blocks = torch.rand(1, 8, 1, 32_768 // size).topk(count).indices
        name = f"decode, 32 / 8 heads, 32,768 keys, {count} blocks of {size}"
        yield chosen(name, q, k, v, blocks, size)
    for queries, keys, count in ((1, 65_536, 2048), (256, 8192, 512)):
        latents = torch.randn(1, 1, keys, 576)
        blocks = torch.rand(1, 1, queries, keys).topk(count).indices
        name = f"latents, 128 heads, {queries} queries, {count} of {keys:,} keys"
        yield chosen(
            name, torch.randn(1, 128, queries, 576), latents, latents[..., :512], blocks, 1
        )
    for queries, keys, count in ((1, 65_536, 2048), (64, 8192, 512)):
        yield indexed(queries, keys, count)
    n, size = 32, 128
    table = (torch.rand(n, n) < 0.25).tril() | torch.eye(n, dtype=torch.bool)
    q, k, v = (torch.randn(1, heads, n * size, 64) for heads in (8, 2, 2))
    mask = ph.BlockSparse(table, size) & ph.Causal()
    pairs = table.repeat_interleave(size, 0).repeat_interleave(size, 1).tril()
    part = float(table.sum()) / (n * (n + 1) / 2)
    yield (
        f"prefill, 8 / 2 heads, {n * size:,} tokens, {part:.0%} of the causal blocks",
        lambda: ph.attention(q, k, v, mask=ph.Causal()),
        lambda: ph.attention(q, k, v, mask=mask),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=True),
    )


def indexed(queries: int, keys: int, count: int) -> Ways:
    """DeepSeek-V3.2's sizes: 64 heads score the keys, 128 heads attend to the best latents."""
    q, k = torch.randn(1, 64, queries, 128), torch.randn(1, 1, keys, 128)
    weights, latents = torch.rand(1, 64, queries), torch.randn(1, 1, keys, 576)
    asked, source = torch.randn(1, 128, queries, 576), DenseSource(k, k)

    def ours() -> Tensor:
        chosen = choose_keys(q, weights, source, count)
        return ph.attention(asked, latents, latents[..., :512], mask=chosen)

    def torchs() -> Tensor:
        scores = torch.einsum("bht,bhts->bts", weights, (q @ k.mT).relu())
        best = scores.topk(count).indices[:, None]
        return gathered(asked, latents, latents[..., :512], best, 1)

    name = f"indexer and latents, {queries} queries, {count} of {keys:,} keys"
    return name, lambda: ph.attention(asked, latents, latents[..., :512]), ours, torchs


def choices(repeats: int) -> list[dict[str, object]]:
    """Prints and returns what the choice of keys takes, natively and by torch's operations."""
    rows: list[dict[str, object]] = []
    print(f"{'64 heads of 128, 2,048 keys chosen':46} {'native':>8} {'torch':>8} {'ratio':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        for queries, keys in ((1, 65_536), (4, 65_536), (8, 65_536), (256, 8192)):
            q, k = torch.randn(1, 64, queries, 128).to(dtype), torch.randn(1, 1, keys, 128)
            weights, source = torch.rand(1, 64, queries), DenseSource(*[k.to(dtype)] * 2)

            def ours() -> Tensor:
                return choose_keys(q, weights, source, 2048, mask=ph.Causal()).blocks  # noqa: B023

            def torchs() -> Tensor:
                with patch.object(native, "code_for", return_value=None):
                    return ours()

            found, wanted = ours().flatten(0, 2), torchs().flatten(0, 2)
            apart = [len({*a} ^ {*b}) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]
            assert max(apart) <= 8, apart
            turns = [
                [timed(way, time.process_time) for way in (ours, torchs)] for _ in range(repeats)
            ]
            mine, peer = (1e3 * statistics.median(x) for x in zip(*turns, strict=True))
            name = f"{str(dtype)[6:]}, {queries} queries over {keys:,} keys"
            rows.append({"case": name, "native": mine, "torch": peer})
            print(f"{name:46} {mine:8.1f} {peer:8.1f} {peer / mine:6.1f}")
    return rows


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--choice", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    machine = f"{platform.processor() or platform.machine()}, {given.threads} threads"
    if given.choice:
        print(f"{machine}, ms of the processor")
        print(json.dumps(choices(given.repeats)))
        return
    print(f"{machine}, float32, ms")
    print(f"{'':58} {'all keys':>9} {'chosen':>8} {'torch':>8}")
    rows = []
    for name, *ways in cases():
        torch.testing.assert_close(ways[1](), ways[2](), atol=2e-5, rtol=1e-4)
        ways[0]()
        turns = [[timed(way) for way in ways] for _ in range(given.repeats)]
        full, sparse, peer = (1e3 * statistics.median(x) for x in zip(*turns, strict=True))
        rows.append({"case": name, "full": full, "chosen": sparse, "torch": peer})
        print(f"{name:58} {full:9.1f} {sparse:8.2f} {peer:8.1f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
