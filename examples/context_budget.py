"""Which context fits into a memory, for several models and precisions of the cache.

python examples/context_budget.py 24GiB llama-3-8b qwen2.5-7b path/to/config.json
"""

import sys

import polyhead as ph


def main(memory: str, *models: str) -> None:
    print(f"{'tokens that fit beside the weights':<36}{'bfloat16':>10}{'int8':>10}{'int4':>10}")
    for model in models:
        found = []
        for kv_dtype in ("bfloat16", "int8", "int4"):
            plan = ph.plan(model, kv_dtype=kv_dtype, memory=memory)
            assert plan.fit is not None  # a memory was given
            longest = plan.fit.longest_context
            found.append("any" if longest is None else f"{longest:,}")  # windows never fill it
        print(f"{plan.name:<36}" + "".join(f"{number:>10}" for number in found))


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["24GiB", "mistral-7b", "llama-3-8b", "qwen2.5-7b"]))
