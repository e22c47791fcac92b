"""Heads that remember a state against transformers' torch code, in turns, one run.

    python benchmarks/recurrence.py [--threads 2] [--rounds 5]

Gated DeltaNet (16 heads of 128 × 128, float32): prompts, by ``torch_chunk_gated_delta_rule``, and
one more token, by ``torch_recurrent_gated_delta_rule``, which run where flash-linear-attention is
not installed. Results are compared first. The last line is JSON, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import polyhead as ph

H, K, V = 16, 128, 128
Way = Callable[[], Tensor]


def milliseconds(run: Way, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e3


def ways(tokens: int) -> tuple[Way, Way]:
    """Ours and transformers', ``[1, H, T, V]``; of one token both go on with a state."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, H, tokens, K), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, H, tokens, V), torch.rand(1, H, tokens)
    decay = -torch.rand(1, H, tokens) / 10
    state = torch.randn(1, H, K, V) if tokens == 1 else None
    rule = torch_chunk_gated_delta_rule if state is None else torch_recurrent_gated_delta_rule
    theirs = [x.transpose(1, 2) for x in (q, k, v, decay, beta)]
    held = None if state is None else state.clone()

    def ours() -> Tensor:
        options = {} if held is None else {"state": held, "in_place": True}
        return ph.recurrence(q, k, v, decay=decay, beta=beta, delta=True, **options)

    def others() -> Tensor:
        out, _ = rule(*theirs, initial_state=state, output_final_state=True)
        return out.transpose(1, 2)

    torch.testing.assert_close(ours(), others(), atol=1e-5, rtol=1e-4)
    return ours, others


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{platform.machine()}, {options.threads} threads, float32, ms")
    print(f"{'gated DeltaNet, 16 heads of 128':40}{'ours':>10}{'torch':>10}{'ratio':>8}")
    found = []
    for tokens, calls in ((1, 200), (64, 20), (512, 3), (2048, 1)):
        pair = ways(tokens)
        rounds = [[milliseconds(way, calls) for way in pair] for _ in range(options.rounds)]
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{tokens:>6} tokens{'':27}{ours:>10.3f}{theirs:>10.3f}{theirs / ours:>8.2f}")
        found.append({"tokens": tokens, "ours": ours, "torch": theirs})
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
