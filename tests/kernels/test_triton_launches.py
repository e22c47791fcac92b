"""What a launch of our Triton kernels asks of a device, seen without one: kernels are not run.

A decoding step must wait for nothing on the device, or no CUDA graph could hold it: the operations
that torch records of it are none that wait. Needs Triton, and neither a GPU nor its interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

import polyhead as ph
from polyhead.caches import Latent, Paged, pages
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.generation.decoding.steps import DecoderSteps
from polyhead.kernels import KERNELS
from polyhead.kernels.triton import kernel, launch
from polyhead.models import Transformer, inputs

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
    monkeypatch.setattr(pages, "WITHOUT_INDEX", frozenset())  # as on a GPU
    return found


CACHES = {
    "dense": ph.DenseCache,
    "dense, with room": lambda: ph.DenseCache(capacity=256),
    "paged": lambda: ph.PagedCache(16),
    "ring": lambda: ph.RingCache(30),
    "quantized": lambda: ph.QuantizedCache(4, 4, group=8, recent=8),
    "quantized, paged": lambda: ph.QuantizedCache(group=8, recent=8, layout=Paged(16)),
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


@pytest.mark.parametrize("made", ["dense", "paged", "latent"])
def test_a_decoding_step_of_a_model_waits_for_nothing_on_the_device(made, launches, monkeypatch):
    monkeypatch.setattr("polyhead.native.code", lambda: None)
    monkeypatch.setattr("polyhead.native.code_for", lambda *tensors: None)
    monkeypatch.setattr(kernel.TritonKernel, "auto_skip_reason", lambda self, call: None)
    for name in ("native", "sdpa"):
        monkeypatch.setattr(type(KERNELS[name]), "unavailable", lambda self: "not on a GPU")
    attention = AttentionConfig(4, num_kv_heads=2, head_dim=16, rope=RopeConfig())
    if made == "latent":
        attention = LatentAttentionConfig(4, 32, 16, 8, 16)
    layer = LayerConfig(attention, FeedForwardConfig(96))
    sizes = {"vocab_size": 50, "embed_dim": 64, "max_positions": 64}
    model = Transformer(TransformerConfig(kind="decoder", layers=(layer, layer), **sizes)).eval()
    cache = model.new_cache(**({"kind": "paged"} if made == "paged" else {}))
    steps = DecoderSteps(model, [[1, 2, 3]], cache)
    steps.start()
    for _ in range(2):
        steps.step([4])
    launches.clear()
    # The check of ids reads them, on the CPU.
    monkeypatch.setattr(inputs, "check_ids", lambda name, ids, size: seen.append(ids.device.type))
    seen = []
    assert not operations(lambda: steps.step([4])) & WAITING
    assert launches
    assert seen == ["cpu"]


def test_ids_of_the_cpu_are_sent_to_a_model_elsewhere():
    layer = LayerConfig(AttentionConfig(4, num_kv_heads=2, head_dim=16), FeedForwardConfig(96))
    sizes = {"vocab_size": 50, "embed_dim": 64, "max_positions": 64}
    config = TransformerConfig(kind="decoder", layers=(layer,), **sizes)
    model = Transformer(config).eval().to("meta")
    steps = DecoderSteps(model, [[1, 2, 3]], model.new_cache())
    assert steps.model(torch.tensor([[1, 2, 3]]), positions=torch.arange(3)).is_meta
    with pytest.raises(ph.InputError, match="ids must be 0 to 49"):
        steps.step([50])
