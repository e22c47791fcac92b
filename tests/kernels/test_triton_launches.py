"""What a launch of our Triton kernels asks of a device, seen without one: kernels are not run.

A decoding step must wait for nothing on the device, or no CUDA graph could hold it: the operations
that torch records of it are none that wait. Needs Triton, and neither a GPU nor its interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

import polyhead as ph
from polyhead.caches import Latent, Paged
from polyhead.kernels.triton import kernel, launch

WAITING = {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal",
    "aten::unique", "aten::_unique2", "aten::masked_select", "aten::lift_fresh",
    "aten::repeat_interleave",
}  # fmt: skip
"""What reads from a device, or copies numbers of Python to it (``lift_fresh``), and waits."""


class Recorded:
    """Stands in for a kernel: ``kernel[grid](...)`` records the launch."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.launches.append((grid, named))


@pytest.fixture
def launches(monkeypatch):
    found = []
    monkeypatch.setattr(launch.forward, "attend", Recorded(found))
    monkeypatch.setattr(launch.merging, "merge", Recorded(found))
    monkeypatch.setattr(kernel, "interpreting", lambda: True)  # takes tensors of a CPU
    monkeypatch.setattr(kernel.TritonKernel, "unavailable", lambda self: None)
    return found


CACHES = {
    "dense": ph.DenseCache,
    "dense, with room": lambda: ph.DenseCache(capacity=256),
    "paged": lambda: ph.PagedCache(16),
    "ring": lambda: ph.RingCache(30),
    "quantised": lambda: ph.QuantizedCache(4, 4, group=8, recent=8),
    "quantised, paged": lambda: ph.QuantizedCache(group=8, recent=8, layout=Paged(16)),
    "latent": lambda: ph.QuantizedCache(group=8, recent=8, latent=Latent(24, 8)),
}
ASKED = [
    {},
    {"mask": ph.Causal() & ph.Window(20), "bias": ph.ALiBi(4), "softcap": 5.0},
    {"mask": ~ph.Window(3)},
]


def operations(step):
    """The names of torch's operations in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("cache", CACHES)
def test_a_decoding_step_waits_for_nothing_on_the_device(cache, launches):
    latent = cache == "latent"
    G, V = (1, 24) if latent else (2, 32)
    store = CACHES[cache]()
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, G, 70, 32)
    v = k[..., :V] if latent else torch.randn(2, G, 70, V)
    store.append(k[:, :, :60], v[:, :, :60])

    def step(at):
        source = store.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        for asked in ASKED:
            ph.attention(q, source, **asked, kernel="triton")

    step(60)
    launches.clear()
    waits = [operations(lambda at=at: step(at)) & WAITING for at in range(61, 70)]
    # A unit of codes and a ring end among these tokens; at a page's end its table is copied anew.
    assert sum(map(bool, waits)) <= ("paged" in cache)
    assert set().union(*waits) <= {"aten::lift_fresh"}
    assert launches


def test_what_waits_would_be_seen(launches):
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = ph.KeyLengths([4, 9])  # numbers of Python, copied at every call

    def step():
        ph.attention(q, k, v, mask=mask, kernel="triton")

    assert "aten::lift_fresh" in operations(step)
    assert "aten::item" in operations(lambda: q.sum().item())
