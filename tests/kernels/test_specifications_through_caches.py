"""Every feature read through every cache equals the same call on plain tensors, or is refused."""

from collections import Counter

import pytest
import torch

import axes
import matrix
import polyhead as ph

CACHES = {
    "dense": ph.DenseCache,
    "paged": lambda: ph.PagedCache(16),
    "ring": lambda: ph.RingCache(64),
    "quantized": lambda: ph.QuantizedCache(group=8, recent=8),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attended(built, cell, kernel, q, *keys):
    arguments = dict(built.arguments)
    if "bias" in built.tensors:
        arguments["bias"] = arguments["bias"](built.tensors["bias"])
    if "seed" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(arguments.pop("seed"))
    sinks = built.tensors.get("sinks")
    return ph.attention(q, *keys, sinks=sinks, return_lse=cell["lse"], kernel=kernel, **arguments)


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_changes_nothing_but_where_keys_lie(cache, small_tiles):
    verdicts = Counter()
    cells = axes.covering_cells(seed=5)[:32]
    for cell in cells:
        cell = cell | {"positions": "default"}
        built = matrix.build(cell)
        q, k, v = (built.tensors[name] for name in "qkv")
        store = CACHES[cache]()
        for part in (slice(0, 11), slice(11, None)):
            source = store.append(k[:, :, part], v[:, :, part])
        plain = source.gather()
        if cache != "quantized":
            assert torch.equal(plain[0], k)
            assert torch.equal(plain[1], v)
        want = attended(built, cell, "reference", q, *plain)
        for kernel in matrix.SWIFT:
            try:
                found = attended(built, cell, kernel, q, source)
            except ph.UnsupportedError as refusal:
                matrix.check_refusal(kernel, str(refusal))
                verdicts[kernel, "refused"] += 1
                continue
            pairs = zip(want, found, strict=True) if cell["lse"] else [(want, found)]
            for a, b in pairs:
                tolerance = TOLERANCE[cell["dtype"]]
                torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance)
            verdicts[kernel, "equal"] += 1
    assert verdicts["tiled", "equal"] == verdicts["reference", "equal"] == len(cells)
