"""SmolLM2 against transformers in one process: decode and prefill, interleaved, equality first.

    python benchmarks/model.py [--dtypes float32 bfloat16] [--rounds 5]

Decode: one token at a time after a prompt of 128 tokens, through the cache. Prefill: 1,024 tokens.
Both models run the same weights, dtype and number of threads; transformers runs the fastest
attention it has on a CPU ("sdpa"). The limit beside decode is the time to read every weight once at
the bandwidth of a sum over as many bytes. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch

import polyhead as ph
from polyhead.checkpoints import find

PROMPT, PREFILL, STEPS = 128, 1024, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor()}")
    theirs = load_theirs()
    rows = []
    for name in arguments.dtypes:
        ours = ph.load("smollm2", dtype=name)
        rows += compare(ours, as_dtype(theirs, getattr(torch, name)), name, arguments.rounds)
    print(f"\n{'work':28} {'polyhead':>12} {'transformers':>14} {'ratio':>7} {'of limit':>9}")
    for row in rows:
        limit = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
        print(
            f"{row['work']:28} {row['polyhead']:>8.1f} t/s {row['transformers']:>10.1f} t/s "
            f"{row['ratio']:>6.2f}× {limit:>9}"
        )
    print(json.dumps({"benchmark": "model", "threads": torch.get_num_threads(), "rows": rows}))


def load_theirs() -> torch.nn.Module:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    file = find("smollm2").path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def as_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in another dtype; its rotary frequencies stay float32, as when it is loaded so."""
    frequencies = model.model.rotary_emb.inv_freq
    model = model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies.float()
    return model


@torch.inference_mode()
def compare(ours: ph.LanguageModel, theirs: torch.nn.Module, dtype: str, rounds: int) -> list[dict]:
    ids = torch.tensor([ours.tokenizer.encode(topics["compound"])[:PREFILL]])
    check_equal(ours, theirs, ids, dtype)

    contestants: dict[str, list[Callable[[], float]]] = {
        "decode": [lambda: decode_ours(ours, ids), lambda: decode_theirs(theirs, ids)],
        "prefill": [lambda: prefill_ours(ours, ids), lambda: prefill_theirs(theirs, ids)],
    }
    weights = sum(p.numel() * p.element_size() for p in ours.parameters())
    rows = []
    for work, runs in contestants.items():
        for run in runs:
            run()
        times: list[list[float]] = [[], []]
        limits = []
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                taken.append(run())
            limits.append(read_time(weights))
        us, them = (statistics.median(taken) for taken in times)
        tokens = STEPS if work == "decode" else PREFILL
        limit = statistics.median(limits)
        rows.append(
            {
                "work": f"{work} {dtype}",
                "polyhead": tokens / us,
                "transformers": tokens / them,
                "ratio": them / us,
                "spread": max(times[0]) / min(times[0]),
                "of_limit": limit * STEPS / us if work == "decode" else None,
            }
        )
    return rows


def check_equal(
    ours: ph.LanguageModel, theirs: torch.nn.Module, ids: torch.Tensor, dtype: str
) -> None:
    """Nothing is timed before both models say the same, within the rounding of the dtype."""
    mine, other = ours(ids).float(), theirs(ids).logits.float()
    agreement = (mine.argmax(-1) == other.argmax(-1)).float().mean().item()
    distance = (mine - other).abs().max().item()
    print(f"{dtype}: top-1 agreement {agreement:.4f}, greatest logit difference {distance:.2e}")
    if agreement < (0.999 if dtype == "float32" else 0.9):
        raise SystemExit(f"the models disagree in {dtype}: top-1 agreement {agreement:.4f}")


def decode_ours(model: ph.LanguageModel, ids: torch.Tensor) -> float:
    cache = model.new_cache(PROMPT + STEPS)
    logits = model(ids[:, :PROMPT], cache=cache, last=1)
    started = time.perf_counter()
    for _ in range(STEPS):
        logits = model(logits[:, -1:].argmax(-1), cache=cache, last=1)
    return time.perf_counter() - started


def decode_theirs(model: torch.nn.Module, ids: torch.Tensor) -> float:
    out = model(ids[:, :PROMPT], use_cache=True, logits_to_keep=1)
    started = time.perf_counter()
    for _ in range(STEPS):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def prefill_ours(model: ph.LanguageModel, ids: torch.Tensor) -> float:
    started = time.perf_counter()
    model(ids, cache=model.new_cache(PREFILL), last=1)
    return time.perf_counter() - started


def prefill_theirs(model: torch.nn.Module, ids: torch.Tensor) -> float:
    started = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def read_time(size: int) -> float:
    """Seconds to read ``size`` bytes once, by a sum."""
    memory = torch.ones(size // 4)
    memory.sum()
    started = time.perf_counter()
    memory.sum()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
